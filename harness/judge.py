"""One case of one submission: generate, guard, run, compare; the judge's verdict and the strict one, side by side.

The order of a case, with the phases that a progress display sees:

    generate   the package's arguments
    inputs     a guarded copy of each, one at a time (guard.py)
    run        run 1 and run 2 on the same data, outputs poisoned anew before each
    baseline   the package's own expected values, or reference.py where its modules are missing
    check      the package's check on run 1's output: the judge verdict
    strict     the error rule against the contract's reference (strict.py)
    run        run 3 on other data behind the same pointers, and the strict rule on it
    time       on a GPU: ours and the baseline, alternating (timing.py)

Everything that is found wrong is kept (ledger.py says which of it becomes the strict verdict). A failed run
(RUNTIME_ERROR, OUT_OF_MEMORY, whatever the language's runtime names) ends the case at once. The judge verdict is worked
out even when the strict one is bad, so that one can see what the judge would have let pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harness import faults, guard, score, strict, tamper, timing
from harness.catalog import shown_path
from harness.contract import Contract
from harness.devices import Device
from harness.faults import BaselineUnavailable, PackageError
from harness.guard import Buffers, Finding
from harness.languages import Submission
from harness.languages.python_source import describe
from harness.ledger import Ledger
from harness.package import Case, Package
from harness.roles import find_roles
from harness.verdict import CaseResult, KernelFault, KitError, Verdict

if TYPE_CHECKING:
    from harness.runner import Job

Timer = Callable[..., timing.PairTime]  # called and raising as timing.pair
SHIFT = 7919  # added to every seed of the package for the second set of data
REPEAT_SHIFT = 104729  # and for each repetition of the whole case
LATE_S = 0.02  # how long a run may have work left elsewhere before its output is read a second time
TIMING_BUDGET_S = 2.0

_sleep = time.sleep


def run_case(
    job: Job,
    package: Package,
    case: Case,
    submission: Submission,
    contract: Contract | None,
    device: Device,
    phase: Callable[[str], None],
    again: int = 0,
    timer: Timer | None = None,
) -> CaseResult:
    """Judge one case. A fault of the submission, the package or the contract is in the record and raises nothing.

    contract: None for a package of a task that the kit does not know; there is then no reference, and the strict
        verdict means finite, written, in bounds, repeatable, and accepted by the package's check on other data too.
    phase: called with the name of each phase as it begins.
    again: how many times the case was judged before; each time has data of its own, and only the first is timed.
    timer: what takes the time on a GPU; timing.pair by default.
    """
    result = CaseResult(job.task, job.language, job.variant, job.suite, case.id, case.label, required=job.required)
    result.notes += submission.notes
    trial = _Trial(package, case, submission, contract, device, phase, result)
    trial.exact = contract is not None and contract.exact_allocations and job.language == "cuda"
    trial.timed = device.is_gpu and bool(job.settings.get("time", True)) and not again
    trial.base = again * REPEAT_SHIFT
    trial.timer = timer or timing.pair
    trial.budget_s = float(job.settings.get("time_budget_s", TIMING_BUDGET_S))
    try:
        trial.go()
    except KernelFault as fault:
        trial.ledger.found(fault.verdict, fault.message)
        trial.ledger.judge(fault.verdict)
    except PackageError as error:
        # Without a contract a baseline that cannot run leaves nothing to compare with, and nobody is to blame.
        verdict = Verdict.SKIPPED if isinstance(error, BaselineUnavailable) else Verdict.PACKAGE_ERROR
        trial.ledger.found(verdict, str(error))
        trial.ledger.judge(verdict)
    except Exception as error:
        named = trial.classify(error)
        if named is None:
            raise
        trial.ledger.findings.append(named)
        trial.ledger.judge(named.verdict)
    trial.ledger.conclude(package.notes)
    return result


class _Trial:
    """The state of one case while it is judged; each method is one step of it."""

    def __init__(
        self,
        package: Package,
        case: Case,
        submission: Submission,
        contract: Contract | None,
        device: Device,
        phase: Callable[[str], None],
        result: CaseResult,
    ) -> None:
        self.package, self.case, self.submission, self.contract = package, case, submission, contract
        self.device, self.result = device, result
        self.exact, self.timed, self.budget_s = False, False, TIMING_BUDGET_S
        self.timer: Timer = timing.pair
        self.ledger = Ledger(result)
        self._announce, self._phase = phase, "generate"
        self._counts: dict[str, Any] = {}
        self.base = 0  # what every seed of the first set of data is moved by
        self._shift = 0
        self._refused_for: list[Any] | None = None  # what the package's check held against ours when it said no
        self._truth: dict[str, Tensor] | None = None  # the reference on the data now in the buffers
        self.buffers: Buffers  # from _guard on
        self.names: list[str] = []

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """A new phase begins."""
        self._phase = name
        self._announce(name)

    def classify(self, error: Exception) -> Finding | None:
        """The finding behind an exception that came from outside the submission's calls; None: it is a bug of ours."""
        said = f"{type(error).__name__}: {_one_line(error)}"
        if faults.is_out_of_memory(error):
            needed, there = self.package.designed_vram_gib() or 0, timing.memory_gib() if self.device.is_gpu else 0
            if there < needed:
                return Finding(Verdict.SKIPPED, f"the case needs {needed:g} GiB and {self.device.name} has {there:.0f}")
            return Finding(Verdict.OUT_OF_MEMORY, f"out of memory in phase {self._phase} ({_one_line(error)})")
        if faults.is_device_fault(error):
            return Finding(Verdict.RUNTIME_ERROR, f"the device reported a fault in phase {self._phase} ({said})")
        if self._phase == "strict" and self.contract is not None:
            return Finding(Verdict.PACKAGE_ERROR, f"{self.contract.path.name} cannot be held against ({said})")
        return None

    # -- the steps -------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """All phases in order."""
        tamper.ensure()
        self.phase("generate")
        self._shift = self.base
        args = self.package.generate(self.case, self.device.torch_name, self.base)
        if self.contract is None:
            self.phase("baseline")
        self.names, roles, notes = find_roles(self.package, self.case, args, self.contract)
        self.result.notes += notes
        if self.contract is not None and not self.result.label:
            self.result.label = self.contract.label(args)
        self.phase("inputs")
        try:
            self.buffers = Buffers(args, self.names, roles, self.exact)
        except ValueError as error:
            raise PackageError(self.package.path, "genTestCase", f"genTestCase: {error}") from error
        self._look_for_tampering()
        first = self._two_runs()
        self.result.counts = self._counts
        baseline = self._expected(first)
        if self.contract is not None:
            self._strict(first, "")
            self._doubt_baseline()
        else:
            self._plain(first)
            self.ledger.note("no reference for this task: strict means finite, written, in bounds and repeatable")
        second = self._second_seed()
        if self.timed and not self.ledger.findings and self.result.judge is Verdict.PASS:
            self._time(second if second is not None else first, timed_baseline=baseline)

    # -- running ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _blame(self) -> Iterator[None]:
        """Whatever goes wrong within is the submission's fault, and ends the case as a KernelFault."""
        path = self.submission.path
        try:
            yield
        except (KernelFault, KitError, KeyboardInterrupt):
            raise
        except SystemExit as error:
            message = f"run_kernel called exit({error.code!r})"
            raise KernelFault(Verdict.RUNTIME_ERROR, message) from error
        except BaseException as error:
            if faults.is_out_of_memory(error):
                message = f"out of memory in run_kernel ({_one_line(error)})"
                raise KernelFault(Verdict.OUT_OF_MEMORY, message) from error
            raise KernelFault(Verdict.RUNTIME_ERROR, f"run_kernel failed: {describe(error, path)}") from error

    def _observe(self, round_: int, label: str) -> dict[int, Tensor]:
        """Arm, run, and look at everything that can be seen without knowing the right values. Returns the outputs."""
        buffers = self.buffers
        buffers.arm(round_)
        if self.device.is_gpu:
            timing.finish_device()  # whatever was left elsewhere must not hit the freshly poisoned outputs
        with self._blame():
            self.submission.run(buffers.arguments())
            if self.device.is_gpu:
                timing.finish_stream()
        seen = buffers.snapshot()
        self._look_for_tampering()
        with self._blame():
            if self.device.is_gpu:
                timing.finish_device()
        _sleep(LATE_S)
        for index, now in buffers.outputs().items():
            late = guard.differences(seen[index], now)
            if late is not None:
                self.ledger.found(
                    Verdict.UNWRITTEN_OUTPUT,
                    f"{late.number} of {now.numel()} elements of {self.names[index]} were written only after the "
                    f"current stream had finished{label}: work was left on another stream or thread",
                )
        self.ledger.findings += [Finding(verdict, detail + label) for verdict, detail in buffers.damage()]
        mutated = buffers.mutated()
        self.ledger.findings += [Finding(verdict, detail + label) for verdict, detail in mutated]
        if mutated:
            self._refill(self._shift)
        return seen

    def _look_for_tampering(self) -> None:
        for name in tamper.changed():
            self.ledger.found(Verdict.TAMPERED, f"the submission replaced {name}")
            return

    def _refill(self, shift: int) -> bool:
        """The package's data, every seed moved by `shift`, behind the same pointers; returns whether it changed."""
        self._shift, self._truth = shift, None
        return self.buffers.refill(self.package.generate(self.case, self.device.torch_name, shift))

    def _two_runs(self) -> dict[int, Tensor]:
        """Runs 1 and 2 on the same data. Returns the outputs of run 1."""
        self.phase("run")
        self.submission.drain()
        first = self._observe(0, "")
        self._counts = self.submission.drain()
        second = self._observe(1, " in the second run")
        for index, before in first.items():
            self._unwritten(index, before, second[index], "")
            apart = guard.differences(before, second[index])
            if apart is not None and not self._poison_explains(index, before, second[index]):
                where = strict.place(apart.first, before.shape)
                values = [tensor.reshape(-1)[apart.first].item() for tensor in (before, second[index])]
                self.ledger.found(
                    Verdict.NONDETERMINISTIC,
                    f"{self.names[index]}{where} = {values[0]} and then {values[1]} on the same data; "
                    f"{apart.number} of {before.numel()} elements differ between two runs",
                )
        return first

    def _poison_explains(self, index: int, first: Tensor, second: Tensor) -> bool:
        """Elements that nobody wrote hold other poison in the second run: that is one fault, not two."""
        return index in self.buffers.poisoned() and guard.unwritten(first, second) is not None

    def _unwritten(self, index: int, first: Tensor, second: Tensor | None, label: str) -> None:
        left = guard.unwritten(first, second) if index in self.buffers.poisoned() else None
        if left is not None:
            where = strict.place(left.first, first.shape)
            self.ledger.found(
                Verdict.UNWRITTEN_OUTPUT,
                f"{left.number} of {first.numel()} elements of {self.names[index]} were never written{label}, "
                f"the first is {self.names[index]}{where}",
            )

    # -- comparing -------------------------------------------------------------------------------------------------

    def _target(self, outputs: dict[int, Tensor]) -> list[Any]:
        """The arguments after a run, for the package's check. It may work in its outputs: they are copies."""
        args = self.buffers.arguments()
        for index, value in outputs.items():
            args[index] = guard.copy(value)
        return args

    def _expected(self, outputs: dict[int, Tensor]) -> bool:
        """Phases baseline and check. Returns whether the package's own baseline is what was compared against."""
        self.phase("baseline")
        originals = self.buffers.originals()
        own = True
        try:
            expected = self.package.run_baseline(self.case, originals)
            self.result.baseline = f"{self.package.path.name} baseline"
        except BaselineUnavailable as error:
            if self.contract is None:
                raise
            own = False
            expected = self._substitute(originals)
            self.result.baseline = f"reference.py ({error.module} not importable)"
        if not self._package_wrote("baseline"):
            self.phase("check")
            self._check(originals, outputs, expected)
        return own

    def _package_wrote(self, function: str) -> bool:
        """Whether the package's own function wrote into inputs. That is not the kernel's fault; they are put back."""
        names = self.buffers.overwritten()
        if names:
            where = shown_path(self.package.path)
            self.ledger.found(Verdict.PACKAGE_ERROR, f"{where}: {function} wrote into the input {', '.join(names)}")
            self.ledger.judge(Verdict.PACKAGE_ERROR)
            self._refill(self._shift)
        return bool(names)

    def _substitute(self, originals: list[Any]) -> list[Any]:
        assert self.contract is not None
        expected = list(originals)
        for name, value in self._reference(self.contract).items():
            index = self.names.index(name)
            expected[index] = value.to(originals[index].dtype)
        return expected

    def _reference(self, contract: Contract) -> dict[str, Tensor]:
        if self._truth is None:
            self._truth = contract.reference(*self.buffers.originals())
        return self._truth

    def _check(self, originals: list[Any], outputs: dict[int, Tensor], expected: list[Any]) -> None:
        try:
            good, said = self.package.check(self.case, originals, self._target(outputs), expected)
        except PackageError as error:
            self.ledger.judge(Verdict.PACKAGE_ERROR)
            self.ledger.found(Verdict.PACKAGE_ERROR, str(error))
            return
        if self._package_wrote("check"):
            return
        self.ledger.judge(Verdict.PASS if good else Verdict.WRONG_ANSWER)
        if not good:
            self.ledger.refusal = f"the package's check says no{': ' + said.splitlines()[-1] if said else ''}"
            self._refused_for = expected
        if said and (good or len(said.splitlines()) > 1):
            self.result.said = said

    def _strict(self, outputs: dict[int, Tensor], label: str) -> None:
        """The error rule on every output that the contract names."""
        assert self.contract is not None
        self.phase("strict")
        truth, honest = self._reference(self.contract), self.contract.honest(*self.buffers.originals())
        for name in self.contract.outputs:
            agreement = strict.compare(name, outputs[self.names.index(name)], truth[name], honest[name])
            self.result.margin = max(self.result.margin or 0.0, agreement.margin)
            if agreement.finding is not None:
                self.ledger.found(agreement.finding.verdict, agreement.finding.detail + label)

    def _doubt_baseline(self) -> None:
        """Where the check says no to an output that agrees with the reference, see whether the baseline does."""
        expected, self._refused_for = self._refused_for, None
        if expected is None or self.contract is None or self.ledger.findings:
            return
        truth, honest = self._reference(self.contract), self.contract.honest(*self.buffers.originals())
        for name in self.contract.outputs:
            finding = strict.compare(name, expected[self.names.index(name)], truth[name], honest[name]).finding
            if finding is not None:
                self.ledger.note(f"the kernel agrees with reference.py; the baseline does not: {finding.detail}")

    def _plain(self, outputs: dict[int, Tensor]) -> None:
        """Without a reference: every floating-point output finite."""
        for index, value in outputs.items():
            bad = strict.first_non_finite(value)
            if bad is not None:
                where = strict.place(bad.first, value.shape)
                detail = f"{self.names[index]}{where}: {bad.number} elements are not finite"
                self.ledger.found(Verdict.NON_FINITE, detail)

    def _second_seed(self) -> dict[int, Tensor] | None:
        """Run 3: other data behind the same pointers. Returns its outputs, None when the data cannot be moved."""
        label = " with the second seed"
        self.phase("generate")
        try:
            moved = self._refill(self.base + SHIFT)
        except (PackageError, ValueError) as error:
            self.ledger.note(f"no second seed: {error}")
            return None
        if not moved:
            self.ledger.note("no second seed: the package's data depends on none")
        self.phase("run")
        outputs = self._observe(0, label)
        for index, value in outputs.items():
            self._unwritten(index, value, None, label)
        if self.contract is not None:
            self._strict(outputs, label)
        else:
            self._plain(outputs)
            self._check_again(outputs)
        return outputs

    def _check_again(self, outputs: dict[int, Tensor]) -> None:
        """Without a reference, the package's check is all there is to hold the second data's output against."""
        self.phase("check")
        originals = self.buffers.originals()
        expected = self.package.run_baseline(self.case, originals)
        if self._package_wrote("baseline"):
            return
        good, said = self.package.check(self.case, originals, self._target(outputs), expected)
        if self._package_wrote("check"):
            return
        if not good and self.result.judge is Verdict.PASS:
            self.ledger.found(Verdict.WRONG_ANSWER, f"the package's check says no with the second seed {said}".rstrip())

    # -- timing ----------------------------------------------------------------------------------------------------

    def _time(self, wanted: dict[int, Tensor], timed_baseline: bool) -> None:
        """Time ours beside the baseline; the output of some timed calls, unknown to the kernel, is checked."""
        self.phase("time")

        def unchanged() -> bool:
            return all(guard.differences(wanted[i], now) is None for i, now in self.buffers.outputs().items())

        def ours() -> None:
            with self._blame():
                self.submission.run(args)

        self._truth = None
        args = self.buffers.arguments()
        workload = self.contract.workload(*args) if self.contract is not None else None
        hooks = timing.Hooks(before=lambda: self.buffers.repoison(0), holds=unchanged)
        peer = self._peer() if not timed_baseline or (self.contract and self.contract.peer_first) else None
        if timed_baseline and peer is None:
            with self.package.baseline_call(self.case, self.buffers.originals()) as baseline:
                times = self.timer(ours, baseline, self.budget_s, workload, hooks)
        else:
            times = self.timer(ours, peer, self.budget_s, workload, hooks)
            if peer is not None:
                self._yardsticks(workload, times.ours_ms)
        self._look_for_tampering()
        self.ledger.findings += self.buffers.damage()
        self.ledger.findings += self.buffers.mutated()
        if times.wrong_calls:
            self.ledger.found(
                Verdict.WRONG_ANSWER,
                f"timed call {times.wrong_calls[0] + 1} gave another output than the checked call on the same data",
            )
        self.result.ours_ms, self.result.baseline_ms = times.ours_ms, times.baseline_ms
        self.result.notes += times.notes
        self.result.figures = times.figures
        if times.suspicion:
            self.ledger.found(Verdict.SUSPECT_TIME, times.suspicion)
        elif times.baseline_ms is not None and not self.ledger.findings:
            self.result.score = score.preview(times.ours_ms, times.baseline_ms)

    def _peer(self) -> Callable[[], object] | None:
        """Another library's kernel to time beside ours where the package's baseline is missing; None without one."""
        if self.contract is None or self.contract.peer is None:
            return None
        try:
            name, call = self.contract.peer(*self.buffers.originals())
        except ImportError as error:
            self.ledger.note(f"not timed against another library: {_one_line(error)}")
            return None
        self.result.peer = name
        return call

    def _yardsticks(self, workload: Mapping[str, Any] | None, ours_ms: float) -> None:
        """Other calls that the contract wants to see beside the peer, each timed alone, as notes."""
        if self.contract is None or self.contract.yardsticks is None or workload is None:
            return
        for name, call in self.contract.yardsticks(*self.buffers.originals()).items():
            try:
                times = timing.pair(call, None, self.budget_s / 4, workload)
            except Exception as error:  # not offered by this device, or not for these shapes: ours stands without it
                self.ledger.note(f"{name}: {_one_line(error)}")
                continue
            ms, doubt = times.ours_ms, " (doubtful)" if times.suspicion else ""
            rates = f"{workload['flops'] / ms / 1e9:.3g} T/s, {workload['bytes'] / ms / 1e6:.0f} GB/s"
            ratio = f", {ms / ours_ms:.3g} times ours" if ours_ms > 0 else ""
            self.ledger.note(f"{name}: {ms:.4g} ms{doubt}, {rates}{ratio}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
