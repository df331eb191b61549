"""Check the jaxtyping annotations of public functions with beartype while the tests run.

An import hook decorates the public top-level functions of the named packages. Dataclasses are left alone: a pytree class also holds
specifications, shardings and tracers in the fields that are annotated as arrays. A dimension that is an expression for the reader (`R+1`,
`E/2`, `V'`) matches any size: jaxtyping could evaluate it only where the letters stand in an earlier argument.
"""

import ast
import importlib.abc
import importlib.machinery
import re
import sys
import typing

import beartype
import jaxtyping

ARRAYS = ("Bool", "Float", "Int", "Num", "Shaped", "UInt", "UInt8", "UInt32")  # as the packages import them from jaxtyping
CHECKABLE = re.compile(r"[*#]*\w+|\.\.\.")  # a name or number, perhaps with jaxtyping's marks for several axes and broadcasting


def install(packages: tuple[str, ...]) -> None:
    """Decorate the functions of every module of these packages that is imported from now on."""
    sys.meta_path.insert(0, _Finder(packages))


def checked(function):
    """The function with its array annotations checked; others stay free, so that a test may pass a stand-in for a loaded model."""
    hints = function.__annotations__
    arrays = {name: hint for name, hint in hints.items() if _speaks_of_arrays(hint)}
    if not arrays:
        return function
    function.__annotations__ = arrays
    wrapper = jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)
    wrapper.__annotations__ = hints
    return wrapper


def _speaks_of_arrays(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_speaks_of_arrays(part) for part in typing.get_args(hint))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        # Past the bytecode cache: what is compiled here must not be found by an ordinary import.
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ARRAYS:
                _simplify(node)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                decorator = ast.parse(f"__import__({__name__!r}).checked", mode="eval").body
                for part in ast.walk(decorator):
                    ast.copy_location(part, node)
                node.decorator_list.append(decorator)
        return compile(tree, path, "exec", dont_inherit=True)


def _simplify(annotation: ast.Subscript) -> None:
    """`Int[Array, "R+1 D"]` -> `Int[Array, "_ D"]`."""
    for part in ast.walk(annotation):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            part.value = " ".join(axis if CHECKABLE.fullmatch(axis) else "_" for axis in part.value.split())
