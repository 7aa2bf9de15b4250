"""Functions and classes by value, for processes that cannot import them.

pickle sends a function as "module and name", which a new process can only resolve for modules that it can import: not
for a notebook cell, a program read from standard input, or a lambda. `multiprocessing` re-runs the script for that, so
it needs an import guard and loses every global that was set at run time; cloudpickle does it by value, but lamina
outside `lamina.train` needs torch and numpy only. This file does the part that `launch` needs: functions and classes of
`__main__`, and nested functions of any module, travel as code plus the globals that this code reads; everything else
goes by reference as usual. Both sides must run the same Python, since code travels in its marshalled form.

`dumps` is for the sender, `loads` for a process whose own `__main__` is an empty namespace.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import dis
import enum
import functools
import importlib
import io
import linecache
import marshal
import pickle
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

# Objects of `dataclasses` that are compared by identity: they travel as names.
_SENTINELS = {
    id(value): name
    for name, value in vars(dataclasses).items()
    if name in ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR", "_HAS_DEFAULT_FACTORY")
}
# Types that no module holds under their own name (`builtins.cell`).
_NAMELESS = {id(value): name for name, value in vars(types).items() if isinstance(value, type)}
# What a class statement makes by itself, or what belongs to one interpreter.
_MADE_BY_CLASS = {"__dict__", "__weakref__", "__slots__", "_abc_impl", "__module__", "__qualname__"}
_MADE_BY_ENUM = set(vars(enum.Flag("Bare", []))) - {"__doc__"}  # the tables and methods of every enum class
_MADE_BY_NAMEDTUPLE = set(vars(collections.namedtuple("Bare", []))) - {"__doc__"}
_GLOBAL_OPERATIONS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    return pickle.dumps((buffer.getvalue(), packer.sources))


def loads(data: bytes) -> Any:
    body, sources = pickle.loads(data)
    for filename, lines in sources.items():
        # Tracebacks show the lines, and inspect.getsource (torch.compile, triton) finds them.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return pickle.loads(body)


def globals_of(fn: Any) -> dict[str, Any]:
    """The globals that the code of `fn` reads."""
    code = getattr(fn, "__code__", None)
    return {name: fn.__globals__[name] for name in _global_names(code) if name in fn.__globals__} if code else {}


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in _SENTINELS:
            return getattr, (dataclasses, _SENTINELS[id(obj)])
        if id(obj) in _NAMELESS:
            return getattr, (types, _NAMELESS[id(obj)])
        if isinstance(obj, types.FunctionType):
            return NotImplemented if _importable(obj) else self._function(obj)
        if isinstance(obj, type):
            return NotImplemented if _importable(obj) else _class(obj)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.CellType):
            return types.CellType, (), _cell_contents(obj), None, None, _fill_cell
        if isinstance(obj, property):
            return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)
        if isinstance(obj, (classmethod, staticmethod)):
            return type(obj), (obj.__func__,)
        if isinstance(obj, functools.cached_property):
            return functools.cached_property, (obj.func,)
        if isinstance(obj, functools._lru_cache_wrapper) and not _importable(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, typing.TypeVar) and obj.__module__ == "__main__":
            settings = (obj.__bound__, obj.__covariant__, obj.__contravariant__)
            return _type_variable, (obj.__name__, obj.__constraints__, *settings)
        if isinstance(obj, types.MappingProxyType):
            return types.MappingProxyType, (dict(obj),)
        return NotImplemented

    def _function(self, fn: types.FunctionType) -> Any:
        code = fn.__code__
        if code.co_filename not in self.sources and fn.__module__ == "__main__":
            lines = linecache.getlines(code.co_filename, fn.__globals__)
            if lines:
                self.sources[code.co_filename] = lines
        # A module that can be imported lends the function its own globals; of `__main__` those that are read travel.
        home = sys.modules.get(fn.__module__ or "")
        at_home = home is not None and vars(home) is fn.__globals__
        by_value = not at_home or fn.__module__ == "__main__"
        names = _global_names(code)
        used = {name: fn.__globals__[name] for name in names if name in fn.__globals__} if by_value else {}
        for name in ("__package__", "__file__"):
            if by_value and isinstance(fn.__globals__.get(name), str):
                used[name] = fn.__globals__[name]
        make = (marshal.dumps(code), fn.__module__ if at_home else None, fn.__closure__)
        state = {
            "globals": used,
            "submodules": _submodules(used.values(), code),
            "attributes": {
                "__name__": fn.__name__,
                "__qualname__": fn.__qualname__,
                "__module__": fn.__module__,
                "__doc__": fn.__doc__,
                "__defaults__": fn.__defaults__,
                "__kwdefaults__": fn.__kwdefaults__,
                "__annotations__": fn.__annotations__,
            },
            "dict": fn.__dict__,
        }
        return _make_function, make, state, None, None, _fill_function


def _importable(obj: Any) -> bool:
    """Whether another process finds this very object under its module and name."""
    name, module = getattr(obj, "__qualname__", ""), getattr(obj, "__module__", None)
    if module == "builtins":
        return True
    if module == "__main__" or module not in sys.modules:
        return False
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> list[str]:
    """Globals in the order in which the code names them; attribute names (`x.data`) are not among them."""
    names = (
        instruction.argval
        for inner in _codes(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname in _GLOBAL_OPERATIONS
    )
    return list(dict.fromkeys(names))


def _submodules(values: Any, code: types.CodeType) -> list[str]:
    """`import a.b` binds `a` only: loaded submodules that the code reaches by attribute have to be imported too."""
    words = {name for inner in _codes(code) for name in inner.co_names}
    packages = tuple(value.__name__ + "." for value in values if isinstance(value, types.ModuleType))
    return [
        name for name in sys.modules if packages and name.startswith(packages) and words.issuperset(name.split(".")[1:])
    ]


def _make_function(
    marshalled: bytes, module: str | None, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    code = marshal.loads(marshalled)
    scope = {"__builtins__": __builtins__} if module is None else vars(importlib.import_module(module))
    return types.FunctionType(code, scope, closure=closure)


def _fill_function(fn: types.FunctionType, state: dict[str, Any]) -> None:
    fn.__globals__.update(state["globals"])
    for name in state["submodules"]:
        importlib.import_module(name)
    for name, value in state["attributes"].items():
        setattr(fn, name, value)
    fn.__dict__.update(state["dict"])
    _publish(fn)


def _cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name of the enclosing function that has no value yet
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]


def _type_variable(name: str, constraints: Any, bound: Any, covariant: bool, contravariant: bool) -> Any:
    make: Any = typing.TypeVar
    return make(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)


def _cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _publish(obj: Any) -> None:
    """Put a top-level name of the sender's `__main__` into ours, so that results can refer to it by name."""
    if obj.__module__ == "__main__" and obj.__qualname__.isidentifier():
        vars(sys.modules["__main__"]).setdefault(obj.__qualname__, obj)


def _class(cls: Any) -> Any:
    made: set[str] = set()
    basis: dict[str, Any] = {}
    if issubclass(cls, enum.Enum):
        if "__new_member__" in vars(cls):
            raise pickle.PicklingError(f"the enum {cls.__name__} has its own __new__; put it into a module")
        basis = {name: member.value for name, member in cls.__members__.items()}
        made = _MADE_BY_ENUM | set(basis)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__bases__ == (tuple,):
        basis = {"_fields": cls._fields, "_field_defaults": cls._field_defaults}
        made = {name for name in _MADE_BY_NAMEDTUPLE if not _written_by_user(cls, name)} | set(cls._fields)
    elif "__slots__" in vars(cls):
        basis = {"__slots__": vars(cls)["__slots__"]}
    state = {
        name: value
        for name, value in vars(cls).items()
        if name not in made | _MADE_BY_CLASS
        and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
    }
    bases = vars(cls).get("__orig_bases__", cls.__bases__)  # `Generic[T]`, where there is one
    make = (type(cls), cls.__name__, cls.__qualname__, cls.__module__, bases, basis)
    return _make_class, make, state, None, None, _fill_class


def _written_by_user(cls: type, name: str) -> bool:
    return getattr(vars(cls).get(name), "__module__", None) == cls.__module__


def _make_class(
    metaclass: type, name: str, qualname: str, module: str, bases: tuple[type, ...], basis: dict[str, Any]
) -> type:
    cls: type
    if "_fields" in basis:
        named_tuple: Any = collections.namedtuple
        cls = named_tuple(name, basis["_fields"], defaults=tuple(basis["_field_defaults"].values()))
    else:

        def body(namespace: dict[str, Any]) -> None:
            for key, value in {"__module__": module, "__qualname__": qualname, **basis}.items():
                namespace[key] = value

        # new_class turns `Generic[T]` into the class that it stands for
        cls = types.new_class(name, bases, {} if metaclass is type else {"metaclass": metaclass}, body)
    cls.__module__, cls.__qualname__ = module, qualname
    _publish(cls)
    return cls


def _fill_class(cls: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(cls, name, value)
        if hasattr(type(value), "__set_name__"):
            value.__set_name__(cls, name)
    if type(cls) is not type:  # of use to ABCMeta only, and harmless to others
        abc.update_abstractmethods(cls)
