"""The judge's problem packages: the one place that knows the protocol of `testcase_config.py` and its quirks.

A package's own fault is a PackageError of one sentence. Two kinds of error pass through unwrapped, because they are
nobody's bug or not the package's: out of memory, and a fault of the device (a kernel that ran earlier may have caused
it).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from harness import foreign
from harness.faults import BaselineUnavailable, PackageError, is_device_fault, is_out_of_memory
from harness.languages.python_source import line_of
from harness.source import load_module

__all__ = ["BaselineUnavailable", "Case", "Package", "PackageError", "load_package"]

REQUIRED = ("getNumOfTestcases", "getTestCaseSize", "genTestCase", "baseline", "check")
_CLASSES = ("INPUT", "OUTPUT", "INOUT")
_VRAM_NAMES = ("DESIGNED_VRAM_SIZE", "getDesignedVramSize", "get_designed_vram_size")
_PRINTED_CHARACTERS = 2000
_MOST_CASES = 10_000  # beyond it is a slip; every case is asked for its sizes, and has a record


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. `id` is 1-based; `sizes` is what getTestCaseSize gave: the shape of every argument, () for a scalar."""

    id: int
    sizes: Sequence[Any]
    warmup: int
    iters: int
    label: str


class Package:
    """A loaded package. Every method raises PackageError when the package's own function fails.

    `notes` collects oddities of the case chosen last that are no error (a tensor whose shape is not the one that
    getTestCaseSize announced).
    """

    def __init__(self, path: Path, module: ModuleType, flags: foreign.TorchFlags, random: foreign.RandomState) -> None:
        self.path = path
        self.notes: list[str] = []
        self._module = module
        self._flags = flags
        self._random = random
        self._count: int | None = None
        self._first_id: int | None = None
        self._fed: int | None = None

    # -- calling into the package ----------------------------------------------------------------------------------

    def _error(self, function: str, problem: str) -> PackageError:
        return PackageError(self.path, function, problem)

    @contextlib.contextmanager
    def _inside(self, stdin: str) -> Iterator[None]:
        """The world as the package left it: its folder as working directory, its torch flags; and the given stdin."""
        harness_flags, folder = foreign.TorchFlags(), os.getcwd()
        self._flags.apply()
        os.chdir(self.path.parent)
        try:
            with foreign.stdin_of(stdin):
                yield
        finally:
            os.chdir(folder)
            self._flags = foreign.TorchFlags()
            harness_flags.apply()

    def _call(self, name: str, *args: Any, stdin: str = "", **kwargs: Any) -> Any:
        """The result of one of the package's functions; whatever it raises becomes a PackageError."""
        function = vars(self._module)[name]
        with self._inside(stdin):
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self._blame(name, error)

    def _blame(self, name: str, error: BaseException) -> NoReturn:
        """Raise what an exception of the package's function amounts to."""
        if isinstance(error, KeyboardInterrupt) or is_out_of_memory(error) or is_device_fault(error):
            raise error
        if name == "baseline":
            self._raise_if_unavailable(error)
        raise self._error(name, f"{name} raised {_describe(error, self.path)}{self._hint()}") from error

    def _hint(self) -> str:
        """Says so when an import that the package swallowed left it without torch."""
        if vars(self._module).get("torch", torch) is not None:
            return ""
        missing = foreign.missing_modules(self.path)
        reason = f", which needs {missing[0]}" if missing else ""
        return f" (the file set torch = None after a failed import{reason})"

    def _raise_if_unavailable(self, error: BaseException) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise BaselineUnavailable(self.path, error.name) from error
        # An import swallowed by try/except shows up later, as an attribute of None or as an error of the file's own.
        missing = foreign.missing_modules(self.path)
        if missing:
            raise BaselineUnavailable(self.path, missing[0]) from error
        if isinstance(error, ImportError):
            raise BaselineUnavailable(self.path, error.name or str(error)) from error

    # -- cases -----------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """The number of cases, at least 1."""
        if self._count is None:
            count = self._call("getNumOfTestcases")
            if isinstance(count, bool) or not hasattr(count, "__index__") or int(count) < 1:
                problem = f"getNumOfTestcases returned {_short(count)}, not a count of cases"
                raise self._error("getNumOfTestcases", problem)
            if int(count) > _MOST_CASES:
                raise self._error("getNumOfTestcases", f"getNumOfTestcases returned {_short(count)} cases")
            self._count = int(count)
        return self._count

    def _feed(self, fed: int) -> tuple[Sequence[Any], int, int]:
        """getTestCaseSize with "<fed>\\n" on stdin: sizes, warm-up calls, timed calls."""
        self._fed = None
        answer = self._call("getTestCaseSize", stdin=f"{fed}\n")
        self._fed = fed
        try:
            sizes, (warmup, iters) = answer
            warmup, iters = int(warmup), int(iters)
            len(sizes)
        except (TypeError, ValueError):
            problem = f"getTestCaseSize returned {_short(answer)} for id {fed}, not ([shapes], (warm-up, iterations))"
            raise self._error("getTestCaseSize", problem) from None
        if warmup < 0 or iters < 1:
            problem = f"getTestCaseSize returned {warmup} warm-up and {iters} timed calls for id {fed}"
            raise self._error("getTestCaseSize", problem)
        return sizes, warmup, iters

    def _first(self) -> int:
        """0 for a package that counts its ids from 0, else 1. The judge feeds ids from 1, so 1 wins where both fit."""
        if self._first_id is not None:
            return self._first_id
        count = self.count()
        answers: list[str | None] = [None] * (count + 2)
        for fed in range(len(answers)):
            with contextlib.suppress(PackageError):
                answers[fed] = repr(self._feed(fed))
        # Counted from the wrong end, a case is lost: to an exception (None) or to a silent fallback (a repetition).
        from_zero, from_one = set(answers[:count]) - {None}, set(answers[1 : count + 1]) - {None}
        # None is lost where every bad id means the first case, id 0: then the ids after the last give that one.
        falls_back_to_0 = answers[1] != answers[0] == answers[count] == answers[count + 1]
        self._first_id = 0 if len(from_zero) > len(from_one) or falls_back_to_0 else 1
        return self._first_id

    def case(self, case_id: int) -> Case:
        """Case `case_id`, 1-based whatever the package's own ids are. ValueError when there is no such case."""
        if not 1 <= case_id <= self.count():
            raise ValueError(f"{case_id=}: {self.path} has cases 1 to {self.count()}")
        self.notes = []
        sizes, warmup, iters = self._feed(case_id - 1 + self._first())
        labels = vars(self._module).get("CASE_LABELS", ())
        label = str(labels[case_id - 1]) if isinstance(labels, (list, tuple)) and case_id <= len(labels) else ""
        return Case(case_id, sizes, warmup, iters, label)

    def _select(self, case: Case) -> None:
        """Puts the package's global state back to `case`: its other functions may depend on the id last read."""
        fed = case.id - 1 + self._first()
        if self._fed != fed:
            self._feed(fed)

    # -- one case --------------------------------------------------------------------------------------------------

    def generate(self, case: Case, device: str, shift: int = 0) -> list[Any]:
        """The argument list of a case: tensors on `device`, and plain Python values.

        Starts from the random state that the file left behind when it was loaded, so that the same case gives the same
        data again in a package that seeds once or never. With `shift` every seed inside is moved (see foreign.seeds):
        other data of the same shapes. Where no seeding call reaches the package's generator, the data are the same:
        compare them.
        """
        self._select(case)
        if torch.device(device).type == "cuda" and torch.cuda.is_available():
            foreign.start_gpu()
        outside = foreign.RandomState()
        self._random.apply()
        self._random = foreign.RandomState()  # from now on with the generators of the GPU too
        try:
            if shift:
                foreign.reseed_globals(shift)
            with foreign.seeds(shift):
                answer = self._call("genTestCase", copy.deepcopy(case.sizes), **self._device_keyword(device))
        finally:
            outside.apply()
        if not isinstance(answer, (list, tuple)):
            raise self._error("genTestCase", f"genTestCase returned {_short(answer)}, not a list of arguments")
        args = [self._argument(position, value, device) for position, value in enumerate(answer)]
        self._compare_shapes(case, args)
        classes = self._classes()
        if classes is not None and len(classes) != len(args):
            raise self._error("INPUT_CLASS", f"INPUT_CLASS has {len(classes)} entries for {len(args)} arguments")
        return args

    def _device_keyword(self, device: str) -> dict[str, Any]:
        """{"device": device} where genTestCase takes it; some take the sizes alone."""
        try:
            parameters = inspect.signature(vars(self._module)["genTestCase"]).parameters.values()
        except (TypeError, ValueError):
            return {"device": device}
        takes = any(p.name == "device" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        return {"device": device} if takes else {}

    def _argument(self, position: int, value: Any, device: str) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device.type == torch.device(device).type else value.to(device)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        problem = f"genTestCase returned a {type(value).__name__} as argument {position + 1}, not a tensor or a number"
        raise self._error("genTestCase", problem)

    def _compare_shapes(self, case: Case, args: list[Any]) -> None:
        if len(case.sizes) != len(args):
            self._note(f"getTestCaseSize announces {len(case.sizes)} arguments, genTestCase returns {len(args)}")
            return
        for position, (size, arg) in enumerate(zip(case.sizes, args, strict=True)):
            shape = tuple(arg.shape) if isinstance(arg, torch.Tensor) else ()
            with contextlib.suppress(TypeError):
                if tuple(size) != shape:
                    self._note(f"argument {position + 1} is announced as {tuple(size)} and generated as {shape}")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _classes(self) -> tuple[str, ...] | None:
        declared = vars(self._module).get("INPUT_CLASS")
        if declared is None:
            return None
        if not isinstance(declared, (list, tuple)):
            raise self._error("INPUT_CLASS", f"INPUT_CLASS is {_short(declared)}, not a list")
        classes = tuple(str(getattr(word, "value", word)).upper() for word in declared)
        for word in classes:
            if word not in _CLASSES:
                raise self._error("INPUT_CLASS", f"INPUT_CLASS holds {word!r}, which is none of {', '.join(_CLASSES)}")
        return classes

    @property
    def outputs(self) -> tuple[int, ...] | None:
        """Indices of the arguments that INPUT_CLASS calls OUTPUT or INOUT; None when the package declares nothing."""
        classes = self._classes()
        return None if classes is None else tuple(i for i, word in enumerate(classes) if word != "INPUT")

    @property
    def inout(self) -> tuple[int, ...]:
        """Indices of the arguments declared INOUT, whose generated contents the kernel may need."""
        return tuple(i for i, word in enumerate(self._classes() or ()) if word == "INOUT")

    def own(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as baseline gets them: tensors declared INPUT shared, all others cloned."""
        classes = self._classes() or ("INOUT",) * len(args)
        return [
            arg.clone() if isinstance(arg, torch.Tensor) and word != "INPUT" else arg
            for arg, word in zip(args, classes, strict=True)
        ]

    @contextlib.contextmanager
    def baseline_call(self, case: Case, args: Sequence[Any]) -> Iterator[Callable[[], None]]:
        """Within the block: the bare baseline on arguments of its own, to be called again and again by a timer.

        The package's torch flags are in force in the whole block. What baseline raises becomes a PackageError.
        """
        self._select(case)
        own, function = self.own(args), vars(self._module)["baseline"]

        def call() -> None:
            try:
                function(*own)
            except BaseException as error:
                self._blame("baseline", error)

        with self._inside(""):
            yield call

    def run_baseline(self, case: Case, args: Sequence[Any]) -> list[Any]:
        """What `check` gets as the baseline's arguments.

        Tensors declared INPUT are shared with `args`, all others cloned (a missing INPUT_CLASS means all). The result
        is the list that baseline returned, as it is, or the clones when it returned None.
        Raises BaselineUnavailable when a module that it imports is not installed.
        """
        self._select(case)
        own = self.own(args)
        answer = self._call("baseline", *own)
        if answer is None:
            return own
        return list(answer) if isinstance(answer, (list, tuple)) else [answer]

    def check(
        self, case: Case, original: Sequence[Any], target: Sequence[Any], baseline: Sequence[Any]
    ) -> tuple[bool, str]:
        """The package's own verdict on `target`, with its own tolerances, and what it printed (the last characters)."""
        self._select(case)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            answer = self._call(
                "check", copy.deepcopy(case.sizes), list(original), list(target), list(baseline), **self._tolerances()
            )
        try:
            if answer is None:
                raise TypeError
            good = bool(answer)
        except (TypeError, ValueError, RuntimeError):
            raise self._error("check", f"check returned {_short(answer)}, not True or False") from None
        return good, printed.getvalue()[-_PRINTED_CHARACTERS:].strip()

    def _tolerances(self) -> dict[str, Any]:
        """rtol and atol for the rare check that demands them; otherwise its own defaults stand."""
        try:
            parameters = inspect.signature(vars(self._module)["check"]).parameters
        except (TypeError, ValueError):
            return {}
        empty = inspect.Parameter.empty
        return {name: 1e-2 for name in ("rtol", "atol") if name in parameters and parameters[name].default is empty}

    def limit(self, case: Case, args: Sequence[Any]) -> dict[str, Any] | None:
        """getWorkload's {"flops": int, "memory_bytes": int, "dtype": str or None}; None where the package has none.

        It is given the sizes or (sizes, timing): whichever gives an answer.
        """
        if not callable(vars(self._module).get("getWorkload")):
            return None
        self._select(case)
        timing = (case.warmup, case.iters)
        first: PackageError | None = None
        for attempt in ((case.sizes,), ((case.sizes, timing),), (case.sizes, timing)):
            try:
                answer = self._call("getWorkload", *copy.deepcopy(attempt))
                return {
                    "flops": int(answer["flops"]),
                    "memory_bytes": int(answer["memory_bytes"]),
                    "dtype": answer.get("dtype"),
                }
            except PackageError as error:
                first = first or error
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                problem = f"getWorkload returned {_short(answer)}, not flops and memory_bytes"
                first = first or self._error("getWorkload", problem)
        assert first is not None
        raise first

    def designed_vram_gib(self) -> float | None:
        """The memory that the package was designed for in GiB, however it says so; None where it does not."""
        for name in _VRAM_NAMES:
            value = vars(self._module).get(name)
            if value is None:
                continue
            value = self._call(name) if callable(value) else value
            try:
                return float(value)
            except (TypeError, ValueError):
                raise self._error(name, f"{name} is {_short(value)}, not a number of GiB") from None
        return None


def _short(value: Any) -> str:
    """A value for a message: its text if that is short, else its type."""
    try:
        text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    except Exception:  # a repr of the package's own; an integer of more than 4300 digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def _describe(error: BaseException, path: Path) -> str:
    """`ValueError: text, line 12`: the exception in one line, with the innermost line of the package's file."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else line_of(error, path)
    name = type(error).__name__
    return (f"{name}: {text}" if text else name) + (f", line {line}" if line else "")


def load_package(path: Path) -> Package:
    """Load a package file under a module name of its own. Raises PackageError when it cannot serve as one."""
    path = path.resolve()
    if not path.is_file():
        raise PackageError(path, "import", "no such file")
    harness_flags, outside, folder = foreign.TorchFlags(), foreign.RandomState(), os.getcwd()
    os.chdir(path.parent)
    try:
        with foreign.stdin_of(""), foreign.seeds():
            module = load_module(path, "package")
            missing = [name for name in REQUIRED if not callable(vars(module).get(name))]
            swallowed = foreign.swallowed_error(path) if missing else ""
        package = Package(path, module, foreign.TorchFlags(), foreign.RandomState())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PackageError(path, "import", f"importing it raised {_describe(error, path)}") from error
    finally:
        os.chdir(folder)
        outside.apply()
        harness_flags.apply()
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        reason = f"; the file swallowed {swallowed}" if swallowed else ""
        raise PackageError(path, missing[0], f"{', '.join(missing)} {verb} missing{reason}")
    return package
