"""The shape of the project: who imports whom, what a wheel holds, and what no file may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmodels.methods import names

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "fedsrv": ROOT / "fedsrv",
    "fedcli": ROOT / "fedcli",
    "fedmodels": ROOT / "models" / "fedmodels",
    "fedpb": ROOT / "proto" / "fedpb",
}

GRPC = ("grpc", "grpc_health", "grpc_reflection")
GRPC_FILES = {
    *("fedsrv/gate.py", "fedsrv/server.py", "fedsrv/service.py", "fedsrv/tls.py"),
    *("fedcli/link.py", "fedcli/tls.py"),
}
DATA_SETS = ("torchvision.datasets", "sklearn.datasets")
PICKLES = (
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.save",
)

FORBIDDEN = {
    "fedsrv": ("fedcli", *DATA_SETS, *PICKLES),
    "fedcli": ("fedsrv", *PICKLES),
    "fedmodels": ("fedsrv", "fedcli", "fedpb", "google", "typer", *GRPC, *DATA_SETS, *PICKLES),
    "fedpb": ("fedsrv", "fedcli", "typer", *GRPC, *PICKLES),
}
"""What a package never imports; a name stands for all that is below it as well."""

FROM_FEDMODELS_INTO_FEDPB = tuple(
    f"fedmodels.{n}" for n in ("types", "packed", "layout", "blocks", "errors")
)
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
MAX_LINES = 400
MIN_METHODS = 4


def sources(package: str) -> list[Path]:
    """Return the hand-written files of a package."""
    return sorted(p for p in PACKAGES[package].rglob("*.py") if "_pb2" not in p.name)


def name_of(path: Path) -> str:
    """Return a file's place as a wheel has it, e.g. ``fedmodels/methods/fedavg.py``."""
    relative = path.relative_to(ROOT).as_posix()
    return re.sub(r"^(models|proto)/", "", relative)


ALL = [(package, path) for package in PACKAGES for path in sources(package)]
EVERY_FILE = pytest.mark.parametrize(
    ("package", "path"), ALL, ids=[name_of(path) for _, path in ALL]
)
METHOD_FILES = [p for p in sources("fedmodels") if p.parent.name == "methods" and p.stem[0] != "_"]


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names a file imports or, of torch, uses; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, [package if node.level else "", node.module]))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            yield f"torch.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield from () if ast.unparse(node.value) == "False" else ("pickle",)


def is_below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def offences(package: str, name: str, source: str) -> list[str]:
    """Return what a file imports though it may not."""
    forbidden = FORBIDDEN[package]
    if package in ("fedsrv", "fedcli") and name not in GRPC_FILES:
        forbidden += GRPC
    found = []
    for imported in imports(ast.parse(source), package):
        into_fedpb = package == "fedpb" and is_below(imported, ("fedmodels",))
        another_method = (
            name.startswith("fedmodels/methods/")
            and is_below(imported, ("fedmodels.methods",))
            and not is_below(imported, ("fedmodels.methods.fedavg", "fedmodels.methods.register"))
        )
        if (
            is_below(imported, forbidden)
            or (into_fedpb and not is_below(imported, FROM_FEDMODELS_INTO_FEDPB))
            or (another_method and name != "fedmodels/methods/__init__.py")
        ):
            found.append(imported)
    return found


MOON = "fedmodels/methods/moon.py"


@EVERY_FILE
def test_imports(package: str, path: Path) -> None:
    assert offences(package, name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("fedsrv/rounds.py", "import grpc", ["grpc"]),
        ("fedsrv/rounds.py", "from grpc_health.v1 import health", ["grpc_health.v1.health"]),
        ("fedsrv/service.py", "import grpc", []),
        ("fedsrv/x.py", "def f():\n    from fedcli import data", ["fedcli.data"]),
        ("fedsrv/x.py", "from torchvision import datasets", ["torchvision.datasets"]),
        ("fedsrv/x.py", "from fedclient import y", []),
        ("fedcli/x.py", "import fedsrv.tls", ["fedsrv.tls"]),
        ("fedcli/x.py", "from torchvision import datasets", []),
        ("fedcli/x.py", "torch.load(f)", ["torch.load"]),
        ("fedcli/x.py", "np.load(f, allow_pickle=True)", ["pickle"]),
        ("fedcli/x.py", "np.load(f, allow_pickle=False)", []),
        ("fedmodels/x.py", "from fedpb import codec", ["fedpb.codec"]),
        ("fedpb/codec.py", "from fedmodels.types import Bundle", []),
        ("fedpb/codec.py", "from fedmodels import method", ["fedmodels.method"]),
        (MOON, "from fedmodels.methods.fedavg import FedAvg", []),
        (MOON, "from fedmodels.methods import register", []),
        (MOON, "from fedmodels.methods import gldp", ["fedmodels.methods.gldp"]),
        (MOON, "from fedmodels.methods.gldp import x", ["fedmodels.methods.gldp.x"]),
    ],
)
def test_the_rules_see_what_they_forbid(name: str, source: str, expected: list[str]) -> None:
    assert offences(name.partition("/")[0], name, source) == expected


def test_the_rules_saw_files() -> None:
    assert len(ALL) > 40
    assert {package for package, _ in ALL} == set(PACKAGES)


# -- files ----------------------------------------------------------------------------------------


@EVERY_FILE
def test_a_file_is_named_after_a_noun_and_short(package: str, path: Path) -> None:
    assert path.stem not in VAGUE_NAMES
    assert path.parent.name not in VAGUE_NAMES
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES


def registered_in(path: Path) -> list[str]:
    """Return the names under which a file registers methods."""
    return [
        str(decorator.args[0].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "register"
        and isinstance(decorator.args[0], ast.Constant)
    ]


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: path.stem)
def test_a_method_file_registers_one_method(path: Path) -> None:
    registered = registered_in(path)
    assert len(registered) == 1
    assert re.sub(r"\W", "_", registered[0]) == path.stem
    assert registered[0] in names()


def test_no_method_is_lost() -> None:
    assert len(METHOD_FILES) >= MIN_METHODS
    assert {name for path in METHOD_FILES for name in registered_in(path)} <= set(names())


# -- the schema -----------------------------------------------------------------------------------


def uncommented(schema: str) -> list[str]:
    """Return the lines of a schema that state something without a comment on it or above it."""
    lines = schema.splitlines()
    statement = re.compile(r"^\s*(message|enum|service|rpc)\b|^[^/]*=\s*\d+\s*(\[.*\])?;")
    return [
        line.strip()
        for above, line in zip(["", *lines], lines, strict=False)
        if statement.search(line) and "//" not in line and not above.strip().startswith("//")
    ]


@pytest.mark.parametrize("path", sorted(PACKAGES["fedpb"].glob("*.proto")), ids=lambda p: p.name)
def test_everything_in_the_schema_is_explained(path: Path) -> None:
    assert uncommented(path.read_text()) == []


def test_what_is_not_explained_is_seen() -> None:
    schema = "message A {\n  int32 a = 1;\n  // b.\n  int32 b = 2;\n  map<a, b> c = 3;  // c.\n}\n"
    assert uncommented(schema) == ["message A {", "int32 a = 1;"]
    assert uncommented("  rpc Join(A) returns (B);") == ["rpc Join(A) returns (B);"]


# -- what is published ----------------------------------------------------------------------------


def test_wheel_holds_the_four_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    tops = {name.split("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert len(tops) == len(PACKAGES) + 1
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert {f"fedpb/{p.name}" for p in PACKAGES["fedpb"].glob("*.proto")} <= held
    assert {name_of(path) for _, path in ALL} <= held
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in held)
    assert not {name for name in held if "__pycache__" in name or name.endswith(".pyc")}


PRIVATE = re.compile(
    r"(?<![\w.}/])/(work|root|home|opt|Users|mnt)/"
    r"|\b(pypi\.org|pythonhosted\.org|registry\.npmjs\.org|deb\.debian\.org)\b"
)


def tracked_texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        if (match := PRIVATE.search(text)) is not None
    ]
    assert found == []


def test_machines_and_registries_are_seen() -> None:
    assert PRIVATE.search("see " + "/work/" + "main")
    assert PRIVATE.search("https://" + "pypi.org" + "/simple")
    assert not PRIVATE.search("benchmarks/work/x and ../root/x")
