"""Which arguments of a case are inputs, which are outputs, and whose contents the kernel may need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness import guard
from harness.contract import Contract
from harness.faults import BaselineUnavailable, PackageError
from harness.guard import Role
from harness.package import Case, Package


def find_roles(
    package: Package, case: Case, args: Sequence[Any], contract: Contract | None
) -> tuple[list[str], list[Role], list[str]]:
    """Names and roles of the arguments, and notes on how they were found.

    The contract decides. Without one it is INPUT_CLASS, else what the baseline changes; whether an output's former
    contents matter is seen by running the baseline on poison, and whether anybody looks at it by what check says to
    poison there. Raises PackageError when the list cannot be the contract's, or nothing in it is an output.
    """
    if contract is not None:
        if len(args) != len(contract.arguments):
            takes = f"run_kernel takes {len(contract.arguments)} ({', '.join(contract.arguments)})"
            raise PackageError(package.path, "genTestCase", f"genTestCase returned {len(args)} arguments, {takes}")
        for index in contract.output_indices:
            if not isinstance(args[index], Tensor):
                problem = f"genTestCase returned no tensor for {contract.arguments[index]}, an output"
                raise PackageError(package.path, "genTestCase", problem)
        outputs = set(contract.output_indices)
        roles = dict.fromkeys(set(package.outputs or ()) - outputs, Role.WORKSPACE) | dict.fromkeys(
            outputs, Role.OUTPUT
        )
        return list(contract.arguments), [roles.get(index, Role.INPUT) for index in range(len(args))], []
    roles, notes = _probe(package, case, args)
    if Role.OUTPUT not in roles.values() and Role.INOUT not in roles.values():
        raise PackageError(package.path, "baseline", "no argument is an output: baseline changes none of them")
    names = [f"argument {index + 1}" for index in range(len(args))]
    return names, [roles.get(index, Role.INPUT) for index in range(len(args))], notes


def _probe(package: Package, case: Case, args: Sequence[Any]) -> tuple[dict[int, Role], list[str]]:
    """Roles of all arguments but the inputs, by running the baseline twice and the check on poison; and notes.

    Raises BaselineUnavailable when the baseline cannot run and the package declares nothing, PackageError when baseline
    or check writes into an input.
    """
    before = {index: _hash(arg) for index, arg in enumerate(args) if isinstance(arg, Tensor)}

    def unharmed(function: str) -> None:
        for index in before.keys() - roles.keys():
            if _hash(args[index]) != before[index]:
                raise PackageError(package.path, function, f"{function} wrote into the input argument {index + 1}")

    tensors = {index for index, arg in enumerate(args) if isinstance(arg, Tensor)}
    declared = None if package.outputs is None else set(package.outputs) & tensors
    roles = {index: Role.INOUT if index in package.inout else Role.OUTPUT for index in declared or ()}
    try:
        result = package.run_baseline(case, args)
        if declared is None:
            roles = {index: Role.OUTPUT for index in tensors if _changed(args, result, index)}
        poisoned = list(args)
        for index, role in roles.items():
            if role is Role.OUTPUT:
                poisoned[index] = _poisoned(args[index])
        again = package.run_baseline(case, poisoned)
        unharmed("baseline")
    except BaselineUnavailable as error:
        if declared is None:
            raise
        return roles, [f"INPUT_CLASS alone says what is an output: {error}"]
    notes = []
    for index in [index for index, role in roles.items() if role is Role.OUTPUT]:
        if _changed(result, again, index):
            roles[index] = Role.INOUT
            notes.append(f"argument {index + 1} keeps its contents: the baseline's result depends on them")
    ignored = {index for index in roles if _ignored(package, case, args, result, index)}
    unharmed("check")
    if ignored != set(roles):
        roles |= dict.fromkeys(ignored, Role.WORKSPACE)
        notes += [f"argument {index + 1} is taken for a workspace: check accepts anything there" for index in ignored]
    else:
        notes.append("check accepts anything in every output")
    return roles, notes


def _hash(tensor: Tensor) -> int:
    return guard.fingerprint(guard.bits(tensor.contiguous()).view(torch.uint8))


def _poisoned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    guard.poison_(copy, 0)
    return copy


def _ignored(package: Package, case: Case, args: Sequence[Any], result: Sequence[Any], index: int) -> bool:
    """Whether check accepts poison in place of the expected contents of one argument."""
    if len(result) != len(args) or not isinstance(result[index], Tensor):
        return False
    target = list(result)
    target[index] = _poisoned(result[index].contiguous())
    try:
        return package.check(case, args, target, result)[0]
    except PackageError:
        return False


def _changed(before: Sequence[Any], after: Sequence[Any], index: int) -> bool:
    """Whether a tensor of two argument lists differs in shape, dtype or bits."""
    if index >= len(after) or not isinstance(after[index], Tensor):
        return False
    left, right = before[index], after[index]
    if left.shape != right.shape or left.dtype != right.dtype:
        return True
    return guard.differences(left.contiguous(), right.contiguous()) is not None
