"""The simulators where g++ hardens by default, as Ubuntu's does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from harness import devices, languages
from harness.cpu import maca_build

HARDENED = "-O2 -D_FORTIFY_SOURCE=3 -D_GLIBCXX_ASSERTIONS -fstack-protector-strong -fstack-clash-protection"
KERNEL = """
#include <cstring>
#include <cuda_runtime.h>
__global__ void reverse(const float* x, float* y) {
    __shared__ float tile[128];
    memcpy(tile + threadIdx.x, x + threadIdx.x, 4);
    __syncthreads();
    memcpy(y + threadIdx.x, tile + 127 - threadIdx.x, 4);
}
extern "C" void run_kernel(const float* x, float* y) { reverse<<<1, 128>>>(x, y); }
"""


@pytest.mark.parametrize("mode", maca_build.MODES)
def test_a_hardened_compiler_changes_nothing(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("g++")
    assert real
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    options = HARDENED + (" -fcf-protection" if os.uname().machine == "x86_64" else "")
    wrapper.write_text(f'#!/bin/sh\nexec {real} {options} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(maca_build, "CACHE", tmp_path / "cache")
    source = tmp_path / "run_kernel.cu"
    source.write_text(KERNEL)
    kernel = languages.load("cuda", source, ("x", "y"), devices.pick("cpu"), mode, {"outputs": ("y",)})
    x, y = torch.arange(128.0), torch.zeros(128)
    kernel.run([x, y])
    assert torch.equal(y, x.flip(0))
