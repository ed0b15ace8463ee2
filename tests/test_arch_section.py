"""The arch section: every pasted copy is the master's, and nothing outside it knows the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import arch_section, devices, languages

MASTER = arch_section.MASTER.read_text(encoding="utf-8")
SUBMISSIONS = arch_section.submissions()


def submission(before: str = "", after: str = "") -> str:
    return before + MASTER + after


@pytest.mark.parametrize("path", SUBMISSIONS, ids=lambda path: path.parts[-3])
def test_copies_are_the_master(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert arch_section.pasted(text, MASTER, path.name) == text, "run python -m harness.arch_section"


@pytest.mark.parametrize(
    ("path", "master"),
    arch_section.sharers(),
    ids=lambda path: "/".join(path.parts[-3:]),
)
def test_shared_copies_are_their_master(path: Path, master: Path) -> None:
    text, copy = path.read_text(encoding="utf-8"), master.read_text(encoding="utf-8")
    assert arch_section.pasted(text, copy, path.name, arch_section.SHARED) == text, "run python -m harness.arch_section"
    changed = text.replace(copy, copy.replace("int", "long", 1))
    assert arch_section.pasted(changed, copy, path.name, arch_section.SHARED) == text != changed


def test_two_tasks_have_a_shared_section_in_both_files() -> None:
    # Guards the test above against an empty list.
    names = sorted("/".join(path.parts[-3::2]) for path, _ in arch_section.sharers())
    assert names == [f"{task}/{name}.cu" for task in ("fused_moe", "mla_decode") for name in ("hopper", "run_kernel")]


@pytest.mark.parametrize("path", SUBMISSIONS, ids=lambda path: path.parts[-3])
def test_bodies_know_no_device(path: Path) -> None:
    assert arch_section.violations(path.read_text(encoding="utf-8"), path.name) == []


def test_ragged_prefill_carries_the_section() -> None:
    # Guards the two tests above against an empty list.
    assert "ragged_prefill" in [path.parts[-3] for path in SUBMISSIONS]


def test_a_changed_copy_is_seen() -> None:
    changed = submission().replace("kAccValues = 8", "kAccValues = 4", 1)
    assert changed != submission()
    assert arch_section.pasted(changed, MASTER, "x.cu") == submission()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("#if 1\n", "#if"),
        ("  #  ifdef __MACA__\n", "#ifdef"),
        ("#endif\n", "#endif"),
        ("#define F(x) x\n", "#define"),
        ('void f() { asm volatile("bar.sync 0;"); }\n', "asm"),
        ('void f() { __asm__("nop"); }\n', "__asm__"),
        ("int x = __builtin_mxc_byte_perm(a, b, 0);\n", "__builtin_mxc_byte_perm"),
        ("int x = a /* off */ + \\\n__builtin_mxc_rcpf(1.0f);\n", "__builtin_mxc_rcpf"),
        ('auto s = R"(a" // )"; asm(s);\n', "asm"),
        ('auto c = \'"\'; asm("");\n', "asm"),
        ("int n = 1'000; asm(n);\n", "asm"),
    ],
)
@pytest.mark.parametrize("where", ["before", "after"])
def test_device_code_in_the_body_is_found(code: str, what: str, where: str) -> None:
    text = submission(before="int a;\n" + code) if where == "before" else submission(after="int a;\n" + code)
    found = arch_section.violations(text, "x.cu")
    assert len(found) == 1
    first = 2 if where == "before" else 2 + len(MASTER.splitlines())
    line = first + next(i for i, row in enumerate(code.splitlines()) if what.lstrip("#") in row)
    assert found[0] == f"x.cu:{line}: {what} outside the arch section"


@pytest.mark.parametrize(
    "code",
    [
        "// #if __MACA__ needs no asm\n",
        "/* #ifdef\n#if\n asm */\n",
        'const char* s = "#if asm __builtin_mxc_mma";\n',
        'const char* s = R"x(\n#if asm )" )x";\n',
        "// a comment that goes on \\\n#if 1\n",
        "#include <stdint.h>\n#pragma unroll\n",
        "int assembly = __builtin_popcount(3);\n",
    ],
)
def test_words_in_comments_and_strings_are_left_alone(code: str) -> None:
    assert arch_section.violations(submission(before=code, after=code), "x.cu") == []


@pytest.mark.parametrize("text", ["int a;\n", MASTER + MASTER, arch_section.END + "\n" + arch_section.BEGIN + "\n"])
def test_bad_markers_are_named(text: str) -> None:
    with pytest.raises(arch_section.SectionError, match=r"x\.cu: found"):
        arch_section.split(text, "x.cu")


def test_paste_and_check_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "tasks" / "demo" / "cuda" / "run_kernel.cu"
    target.parent.mkdir(parents=True)
    (tmp_path / "tasks" / "common").mkdir()
    master = tmp_path / "tasks" / "common" / "arch.cuh"
    master.write_text(MASTER, encoding="utf-8")
    target.write_text(f"int a;\n{arch_section.BEGIN}\n{arch_section.END}\nint b;\n", encoding="utf-8")
    monkeypatch.setattr(arch_section, "ROOT", tmp_path)
    monkeypatch.setattr(arch_section, "MASTER", master)
    monkeypatch.setattr(arch_section, "submissions", lambda: [target])
    assert arch_section.main(["--check"]) == 1
    assert "differs from tasks/common/arch.cuh" in capsys.readouterr().out
    assert arch_section.main([]) == 0
    assert target.read_text(encoding="utf-8") == f"int a;\n{MASTER}int b;\n"
    assert arch_section.main(["--check"]) == 0
    # A task's own shared section goes to every file that has its markers, and to no other.
    shared = f"{arch_section.SHARED[0]} of demo\nint c;\n{arch_section.SHARED[1]}\n"
    (tmp_path / "tasks" / "demo" / "shared.cuh").write_text(shared, encoding="utf-8")
    hopper = target.with_name("hopper.cu")
    hopper.write_text(shared.replace("int c", "int old"), encoding="utf-8")
    capsys.readouterr()
    assert arch_section.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert said == "tasks/demo/cuda/hopper.cu: its shared section differs from tasks/demo/shared.cuh\n"
    assert arch_section.main([]) == 0
    assert hopper.read_text(encoding="utf-8") == shared
    assert arch_section.main(["--check"]) == 0


PRODUCTS = Path(__file__).parent / "cuda" / "arch_products.cu"
# fmt: off
NAMES = (
    "a", "b", "p", "v", "integer", "rows", "direct", "row_max", "columns", "transposed", "placed",
    "a_direct", "halved", "scattered",
)
# fmt: on


def run_products(master: str, mode: str, folder: Path) -> list[str]:
    """Run arch_products.cu with this section; the names of the outputs that differ from plain matrix products."""
    source = folder / "arch_products.cu"
    source.write_text(arch_section.pasted(PRODUCTS.read_text(encoding="utf-8"), master, source.name), encoding="utf-8")
    submission = languages.load("cuda", source, NAMES, devices.pick("cpu"), mode, {"outputs": NAMES[4:]})
    generator = torch.Generator().manual_seed(7)
    # Small integers: exact in bf16 as values, and any order of summation gives the same float32.
    wide = torch.randint(-8, 9, (2, 32, 64), generator=generator).to(torch.bfloat16)
    a, b = (x.view(torch.int8) for x in wide)
    p = torch.randint(-8, 9, (16, 32), generator=generator).float()
    v = torch.randint(-8, 9, (29, 128), generator=generator).to(torch.bfloat16)
    pv = p[:, :29] @ v.float()
    products = wide[0].float() @ wide[1].float().T
    want = {
        "integer": (a.to(torch.int64) @ b.to(torch.int64).T).to(torch.int32),
        "rows": products,
        "direct": products[:16, :16].contiguous(),
        "row_max": p.amax(1),
        "columns": 2 * pv,
        "transposed": pv.to(torch.bfloat16),
        "placed": pv,
        "a_direct": products[:16, :16].contiguous(),
        "halved": p[:, :29] @ v.float().flip(0),
        "scattered": p[:, :29] @ v.float().flip(0),
    }
    got = {name: torch.full_like(x, 77) for name, x in want.items()}
    submission.run([a, b, p, v, *got.values()])
    return [name for name in want if not torch.equal(want[name], got[name])]


@pytest.mark.parametrize("mode", ["wave64", "warp32"])
def test_products_of_the_section(mode: str, tmp_path: Path) -> None:
    assert run_products(MASTER, mode, tmp_path) == []


@pytest.mark.parametrize(
    ("mode", "right", "wrong", "seen"),
    [
        # The operands of the builtin the other way round: the result is the transpose.
        ("wave64", "Half{b.r[0], b.r[1]}, Half{a.r[0], a.r[1]}", "Half{a.r[0], a.r[1]}, Half{b.r[0], b.r[1]}", "rows"),
        ("wave64", "kLow = 0x05040100", "kLow = 0x01000504", "transposed"),
        ("warp32", "b.r[h][2 * n], b.r[h][2 * n + 1]", "b.r[h][n], b.r[h][n + 2]", "integer"),
        ("warp32", "{x.z, x.w, y.z, y.w}", "{x.z, y.z, x.w, y.w}", "direct"),
        ("warp32", "(lane >> 2) + i % 2 * 8", "(lane >> 2) + i / 4 * 8", "a_direct"),
        ("wave64", "i / 4 * 32 + row", "i / 4 * 32 + i", "scattered"),
        ("warp32", "__shfl_sync(~0u, place, i, kLanes)", "__shfl_sync(~0u, place, 0, kLanes)", "halved"),
    ],
)
def test_a_wrong_layout_is_seen(mode: str, right: str, wrong: str, seen: str, tmp_path: Path) -> None:
    assert MASTER.count(right) == 1
    assert seen in run_products(MASTER.replace(right, wrong), mode, tmp_path)
