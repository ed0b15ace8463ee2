"""What the names of a Python file stand for, scope by scope: an import, a builtin, or the file's own.

Rules that go by spelling alone miss `import torch as t`, `from torch import load as f` and a parameter that hides a
module; those here do not.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Scope:
    """`bound`: every name that the scope binds, with the path that an import gives it, or "" for the file's own."""

    def __init__(self, parent: _Scope | None, comprehension: bool = False) -> None:
        self.parent, self.comprehension = parent, comprehension
        self.bound: dict[str, str] = {}
        self.elsewhere: dict[str, _Scope] = {}  # by global and nonlocal statements


class Names:
    """The names of one file. `rebound`: (node, name) where an imported name is bound to something else too."""

    def __init__(self, tree: ast.Module) -> None:
        self._scope_of: dict[ast.AST, _Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self.modules: set[str] = set()  # paths of modules that a name stands for
        self.rebound: list[tuple[ast.AST, str]] = []
        self._top = _Scope(None)
        self._fill(self._top, list(tree.body))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parent[child] = node

    def path(self, node: ast.AST) -> str:
        """`torch.cuda.Event`, `builtins.open`; "" for the file's own and for what is no chain of names."""
        if isinstance(node, ast.Attribute):
            head = self.path(node.value)
            return f"{head}.{node.attr}" if head else ""
        if not isinstance(node, ast.Name):
            return ""
        scope: _Scope | None = self._scope_of.get(node, self._top)
        while scope is not None:
            if node.id in scope.bound:
                return scope.bound[node.id]
            scope = scope.parent
        return f"builtins.{node.id}" if hasattr(builtins, node.id) else ""

    def whole(self) -> Iterator[tuple[ast.expr, str]]:
        """(node, path) of every longest chain of names that starts at an import or a builtin."""
        for node, parent in self.parent.items():
            if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(parent, ast.Attribute):
                path = self.path(node)
                if path:
                    yield node, path

    def _bind(self, scope: _Scope, node: ast.AST, name: str, path: str = "") -> None:
        scope = scope.elsewhere.get(name, scope)
        if name in scope.bound and scope.bound[name] != path:
            self.rebound.append((node, name))
            path = path or scope.bound[name]
        scope.bound[name] = path

    def _fill(self, scope: _Scope, todo: list[ast.AST]) -> None:
        """Note what these nodes bind in `scope`, and do the same for the scopes in them."""
        inner: list[tuple[_Scope, list[ast.AST]]] = []
        todo.reverse()
        while todo:
            node = todo.pop()
            if isinstance(node, _FUNCTIONS):
                inside = _Scope(scope)
                here: list[ast.AST] = []
                if isinstance(node, ast.ClassDef):
                    here += [*node.bases, *node.keywords]
                else:
                    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    every += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
                    for argument in every:
                        inside.bound[argument.arg] = ""
                        here += [argument.annotation] if argument.annotation else []
                    here += [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
                if isinstance(node, ast.Lambda):
                    inner.append((inside, [node.body]))
                else:
                    self._bind(scope, node, node.name)
                    here += node.decorator_list
                    if not isinstance(node, ast.ClassDef) and node.returns:
                        here.append(node.returns)
                    inner.append((inside, [*node.body]))
                todo += reversed(here)
            elif isinstance(node, _COMPREHENSIONS):
                todo.append(node.generators[0].iter)
                first = node.generators[0]
                body: list[ast.AST] = [first.target, *first.ifs, *node.generators[1:]]
                body += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                inner.append((_Scope(scope, comprehension=True), body))
            else:
                self._note(scope, node)
                todo += reversed(list(ast.iter_child_nodes(node)))
        for inside, body in inner:
            self._fill(inside, body)

    def _note(self, scope: _Scope, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self._scope_of[node] = scope
            if not isinstance(node.ctx, ast.Load):
                uncovers = isinstance(node.ctx, ast.Del) and hasattr(builtins, node.id)
                self._bind(scope, node, node.id, f"builtins.{node.id}" if uncovers else "")
        elif isinstance(node, ast.NamedExpr):
            around = scope
            while around.comprehension and around.parent is not None:
                around = around.parent
            self._bind(around, node, node.target.id)
            scope.elsewhere.setdefault(node.target.id, around)
        elif isinstance(node, ast.Global):
            scope.elsewhere.update(dict.fromkeys(node.names, self._top))
        elif isinstance(node, ast.Nonlocal) and scope.parent is not None:
            scope.elsewhere.update(dict.fromkeys(node.names, scope.parent))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self.modules.add(name)
                self._bind(scope, node, alias.asname or name, name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                if path in ("triton.language", "tilelang.language", "tilelang.intrinsics"):
                    self.modules.add(path)
                self._bind(scope, node, alias.asname or alias.name, path)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            self._bind(scope, node, node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._bind(scope, node, node.rest)
