"""What ship.py carries by value, checked where it arrives: in another process."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from harness import run_alone
from lamina import ship

SOURCE = str(Path(__file__).parents[1] / "src")
SENDER = """
    import dataclasses, enum, functools, sys, typing
    sys.path.insert(0, {source!r})
    from lamina import ship

    class Pair(typing.NamedTuple):
        "two numbers"
        x: int
        y: int = 2
        def __repr__(self):
            return f"<{{self.x}} {{self.y}}>"

    class Access(enum.Flag):
        READ = enum.auto()
        WRITE = enum.auto()
        @classmethod
        def both(cls):
            return cls.READ | cls.WRITE

    class Name(str, enum.Enum):
        A = "a"
        B = "b"

    class Level(enum.IntEnum):
        ONE = 1

    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        __slots__ = ("value",)
        def __init__(self, value: T):
            self.value = value

    @dataclasses.dataclass(frozen=True, order=True)
    class Size:
        width: int
        unit: dataclasses.InitVar[str] = "m"
        kind: typing.ClassVar[str] = "size"
        tags: list = dataclasses.field(default_factory=list, metadata={{"a": 1}})

    def outer(fn):
        @functools.wraps(fn)
        def wrapper(*args, plus=1):
            return fn(*args) + plus
        return wrapper

    @outer
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1, plus=0)

    unused = open({source!r} + "/lamina/errors.py")  # cannot be pickled, and `x.unused` is no use of it

    def check(box):
        assert repr(Pair(1)) == "<1 2>" and Pair.__doc__ == "two numbers" and Pair(3)._replace(y=4) == (3, 4)
        assert Access.both().value == 3 and Name("b") is Name.B == "b" and Level.ONE + 1 == 2
        assert type(box) is Box and box.value == 5 and not hasattr(box, "__dict__") and Box[int](7).value == 7
        assert Size(1) < Size(2) and Size(1).tags == []
        assert [field.name for field in dataclasses.fields(Size)] == ["width", "tags"]
        assert even(4) == 2 and even.__wrapped__(0) is True
        try:
            return box.unused
        except AttributeError:
            return "arrived"

    check(Box(5))
    sys.stdout.buffer.write(ship.dumps((check, Box(5), lambda: Size(3, tags=[1]))))
"""


def receive(sent: bytes) -> None:
    """In a new process, whose `__main__` is as empty as that of a rank."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    check, box, size = ship.loads(sent)
    assert check(box) == "arrived" and size().tags == [1]
    assert type(size()) is main.Size
    assert "def check(box)" in inspect.getsource(check)


def test_what_main_defines_arrives(tmp_path: Path) -> None:
    script = tmp_path / "sender.py"
    script.write_text(textwrap.dedent(SENDER.format(source=SOURCE)))
    sent = subprocess.run([sys.executable, str(script)], capture_output=True)
    assert sent.returncode == 0, sent.stderr.decode()
    script.unlink()  # the source travels too
    run_alone(receive, sent.stdout)
