"""The shape of the project: who imports whom, and what no file may say."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedmodels.methods import names
from tests.sizes import (
    CORE,
    MAX_LINES,
    MAX_MODULES,
    MOST,
    PACKAGES,
    ROOT,
    large_parts,
    measures,
    sources,
)

GRPC = ("grpc", "grpc_health", "grpc_reflection")
GRPC_FILES = {
    "fedsrv/transport/gate.py",
    "fedsrv/progress/watching.py",
    "fedplugins/relays/service.py",
    "fedplugins/relays/uplink.py",
    "fedsrv/transport/server.py",
    "fedsrv/transport/listening.py",
    "fedplugins/queues/service.py",
    "fedplugins/queues/reaching.py",
    "fedsrv/transport/service.py",
    "fedsrv/identity/enrolment.py",
    "fedsrv/identity/certificate_guard.py",
    "fedsrv/identity/tls.py",
    "fedcli/runtime/answers.py",
    "fedcli/runtime/certificate_request.py",
    "fedcli/runtime/link.py",
    "fedcli/runtime/own_certificate.py",
    "fedcli/runtime/staying.py",
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

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "fedtide": PICKLES,
    "fedsrv": ("fedcli", "fedtide", *DATA_SETS, *PICKLES),
    "fedcli": ("fedsrv", "fedtide", *PICKLES),
    "fedmodels": (
        "fedsrv",
        "fedcli",
        "fedtide",
        "fedpb",
        "google",
        *GRPC,
        *DATA_SETS,
        *PICKLES,
    ),
    "fedpb": ("fedsrv", "fedcli", "fedtide", *GRPC, *PICKLES),
    "fedplugins": PICKLES,
}
"""What a package never imports; a name stands for all that is below it as well."""

FROM_FEDMODELS_INTO_FEDPB = (
    "fedmodels.tensors", "fedmodels.errors", "fedmodels.facts.client_ids",
    "fedmodels.facts.data_description", "fedmodels.times", "fedmodels.host.files",
)  # fmt: skip
ROOMS = {
    "fedtide": (
        "nets", "numerics", "prototypes", "metrics", "partition", "models", "inprocess", "runs",
        "open_runs", "server_half", "testing.trial", "testing.case", "testing.suite", "testing",
    ),
    "fedmodels": (
        "errors", "times", "host.staying", "host.guarded", "facts.client_ids", "facts.position",
        "host.shortages", "host.machine", "host.devices", "console.printable", "console.charts",
        "console.log_lines", "host.files", "host.line_file", "own.code_names", "own.own_code",
        "host.http_server", "host.spans", "plugins", "console.completion",
        "console.help_panels", "console.commands", "host.processes", "host.warm", "tensors",
        "facts.class_names", "facts.data_description", "numerics", "secure_sum", "config",
        "problems", "reductions", "nets", "privacy", "training", "techniques", "methods",
        "parts", "facts.usual", "facts.resolution", "facts.config_file", "console.rows",
        "console.options",
    ),
    "fedpb": (
        "", "v1", "pem", "revocation", "server_check", "invitation", "channels", "unreachable",
        "tables", "zstd", "frames", "headers", "codec", "orders", "failures", "told", "pace",
        "identities", "signatures", "secure_terms", "peer_certificates",
    ),
    "fedsrv": (
        "progress.events", "engine.availability", "ray.ray_cluster",
        "ray.ray_driver", "identity", "state", "report", "trained.trained_models",
        "trained.begin_from", "progress.run_status", "progress.event_lines", "engine",
        "progress.traces", "parts", "transport", "progress.watching", "dashboard",
        "coordinator", "trained.export", "commands", "launch", "cli", "__main__",
    ),
    "fedcli": (
        "data", "data.cuts", "data.sets", "data.own", "data.store", "gate", "runtime",
        "tracing", "parts", "joining", "predicting.prediction", "predicting.predicted_targets",
        "predicting.live_model", "predicting.watching", "predicting.whose", "pretrain", "cli",
        "hosts", "__main__",
    ),
    "fedplugins": (
        "baselines", "detectors", "drift", "methods", "operations", "presets",
        "queues", "reference", "relays", "serving", "studies", "trackers",
    ),
}  # fmt: skip
"""The rooms of each package, lowest first: a file imports from its own room and from lower ones."""
FOR_METHODS = tuple(f"fedmodels.methods.{n}" for n in ("fedavg", "register"))
"""What the file of a method may import of the methods' room; its variants may import the method."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
MIN_METHODS = 4


def name_of(path: Path) -> str:
    """Return a file's place as a wheel has it, e.g. ``fedmodels/methods/fedavg.py``."""
    relative = path.relative_to(ROOT).as_posix()
    return re.sub(r"^(models|proto)/", "", relative)


ALL = [(package, path) for package in PACKAGES for path in sources(package)]
IN_PLUGINS = [path for package, path in ALL if package == "fedplugins"]
METHOD_FILES = [p for p in sources("fedmodels") if p.parent.name == "methods" and p.stem[0] != "_"]


UNPICKLES = re.compile(r"torch\s*\.\s*(load|save)|allow_pickle")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and the statements in it, at any depth, without their expressions."""
    yield tree
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield from statements(node)


@cache
def said(source: str) -> tuple[tuple[int, str], ...]:
    """Return the names that a source imports or, of torch, uses, each with its leading dots.

    Expressions are looked through where one may be of those that unpickle: it takes seconds.
    """
    found: list[tuple[int, str]] = []
    tree = ast.parse(source)
    for node in ast.walk(tree) if UNPICKLES.search(source) else statements(tree):
        if isinstance(node, ast.Import):
            found += ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = f"{node.module}." if node.module else ""
            found += ((node.level, f"{origin}{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                found.append((0, f"torch.{node.attr}"))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += () if ast.unparse(node.value) == "False" else ((0, "pickle"),)
    return tuple(found)


def imports(source: str, package: str) -> list[str]:
    """Return the dotted names a file imports or, of torch, uses; ``from a import b`` is ``a.b``."""
    return [f"{package}.{name}" if level else name for level, name in said(source)]


def is_below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def offences(package: str, name: str, source: str) -> list[str]:
    """Return what a file imports though it may not."""
    forbidden = FORBIDDEN[package]
    if package in ("fedtide", "fedsrv", "fedcli") and name not in GRPC_FILES:
        forbidden += GRPC
    if package in ("fedmodels", "fedpb") and name != "fedmodels/console/options.py":
        forbidden += ("typer",)
    found = []
    for imported in imports(source, package):
        into_fedpb = package == "fedpb" and is_below(imported, ("fedmodels",))
        is_method = name.startswith(
            ("fedmodels/methods/", "fedplugins/methods/", "fedplugins/baselines/")
        )
        another_method = (
            is_method
            and not name.startswith("fedmodels/methods/variants/")
            and not name.endswith("_variants.py")
            and is_below(imported, ("fedmodels.methods",))
            and not is_below(imported, FOR_METHODS)
        )
        if (
            is_below(imported, forbidden)
            or (into_fedpb and not is_below(imported, FROM_FEDMODELS_INTO_FEDPB))
            or (another_method and name != "fedmodels/methods/__init__.py")
        ):
            found.append(imported)
    return found


MOON, DITTO = "fedplugins/baselines/moon.py", "fedplugins/methods/ditto.py"


def test_imports():
    found = {name_of(p): offences(package, name_of(p), p.read_text()) for package, p in ALL}
    assert {name: imported for name, imported in found.items() if imported} == {}


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("fedsrv/engine/rounds.py", "import grpc", ["grpc"]),
        ("fedsrv/engine/rounds.py", "from grpc_health.v1 import health", ["grpc_health.v1.health"]),
        ("fedsrv/transport/service.py", "import grpc", []),
        ("fedsrv/x.py", "def f():\n    from fedcli import data", ["fedcli.data"]),
        ("fedsrv/x.py", "from torchvision import datasets", ["torchvision.datasets"]),
        ("fedsrv/x.py", "from fedclient import y", []),
        ("fedcli/x.py", "import fedsrv.identity.tls", ["fedsrv.identity.tls"]),
        ("fedcli/x.py", "from torchvision import datasets", []),
        ("fedcli/x.py", "torch.load(f)", ["torch.load"]),
        ("fedcli/x.py", "np.load(f, allow_pickle=True)", ["pickle"]),
        ("fedcli/x.py", "np.load(f, allow_pickle=False)", []),
        ("fedmodels/x.py", "from fedpb import codec", ["fedpb.codec"]),
        ("fedmodels/x.py", "import typer", ["typer"]),
        ("fedpb/x.py", "import typer", ["typer"]),
        ("fedmodels/console/options.py", "import typer", []),
        ("fedpb/codec.py", "from fedmodels.tensors.bundle import Bundle", []),
        ("fedpb/codec.py", "from fedmodels.training import method", ["fedmodels.training.method"]),
        (MOON, "from fedmodels.methods.fedavg import FedAvg", []),
        (MOON, "from fedmodels.methods import register", []),
        (MOON, "from fedmodels.methods import gldp", ["fedmodels.methods.gldp"]),
        (MOON, "from fedmodels.methods.variants import x", ["fedmodels.methods.variants.x"]),
        (MOON, "from fedmodels.methods.gldp import x", ["fedmodels.methods.gldp.x"]),
        (DITTO, "from fedmodels.methods.gldp import x", ["fedmodels.methods.gldp.x"]),
    ],
)
def test_the_rules_see_what_they_forbid(name, source, expected):
    assert offences(name.partition("/")[0], name, source) == expected


def dotted(path: Path) -> str:
    """Return a file's module name."""
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room_of(module: str) -> str:
    """Return the room of a module: the longest name of ``ROOMS`` that it begins with."""
    package, _, rest = module.partition(".")
    fitting = [room for room in ROOMS[package] if rest == room or rest.startswith(f"{room}.")]
    return max(fitting, key=len, default="")


MODULES = {dotted(path): path for _, path in ALL}


def imported_modules(module: str) -> set[str]:
    """Return the modules of this project that a module imports, also inside of functions."""
    found = set()
    for name in imports(MODULES[module].read_text(), module):
        found |= {known for known in (name, name.rpartition(".")[0]) if known in MODULES}
    packages = {f"{name}.__init__" for name in found}
    return {n for n in found if not any(o.startswith(f"{n}.") for o in found)} - packages - {module}


def named_modules(path: Path) -> set[str]:
    """Return the names of modules and of what is in them that a file imports, or has in strings."""
    source = path.read_text()
    words = {
        node.value.replace(":", ".")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"fed\w+(\.\w+)+(:\w+)?", node.value)
    }
    return {*imports(source, dotted(path).rpartition(".")[0]), *words}


def test_the_core_names_no_plugin_not_even_in_strings():
    """But for tests and pages, it knows them by entry points and by plugins.json alone."""
    core = [path for package, path in ALL if package in CORE]
    maybe = [path for path in core if "plugins" in path.read_text()]
    naming = {
        name_of(p) for p in maybe if any(n.startswith("fedplugins.") for n in named_modules(p))
    }
    assert naming == set()


def test_a_plugin_uses_public_names_alone_and_no_other_plugin():
    offending = []
    for path in IN_PLUGINS:
        own = ".".join(dotted(path).split(".")[:2])
        for name in named_modules(path):
            is_core = name.partition(".")[0] in CORE
            is_other = name.startswith("fedplugins.") and not is_below(name, (own,))
            if is_other or (is_core and re.search(r"\._[a-z]", name)):
                offending.append((name_of(path), name))
    assert offending == []


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Return what every module imports of this project."""
    return {module: imported_modules(module) for module in MODULES}


def test_a_room_imports_lower_rooms_only(imported):
    higher = []
    for module in sorted(set(MODULES) - set(ROOMS)):
        package = module.partition(".")[0]
        rank = ROOMS[package].index
        ours = {other for other in imported[module] if other.startswith(f"{package}.")}
        higher += [(module, o) for o in ours if rank(room_of(o)) > rank(room_of(module))]
    assert higher == []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return every group of modules that import each other."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [error.args[1]]
    return []


def test_no_modules_import_in_a_circle(imported):
    assert circles(imported) == []
    assert circles({"a": {"b"}, "b": {"a"}}) != []


def test_a_room_says_what_it_holds():
    for folder in {path.parent for _, path in ALL}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_the_rules_saw_files():
    assert len(ALL) > 40
    assert {package for package, _ in ALL} == set(PACKAGES)
    assert set(CORE) <= set(PACKAGES)


# -- files ----------------------------------------------------------------------------------------


def test_a_file_is_named_after_a_noun():
    assert [path for _, path in ALL if {path.stem, path.parent.name} & VAGUE_NAMES] == []


def test_the_report_of_sizes_names_long_files_and_large_rooms(tmp_path):
    (tmp_path / "long.py").write_text("\n" * (MAX_LINES + 1))
    (tmp_path / "short.py").write_text("\n" * MAX_LINES)
    for number in range(MAX_MODULES - 1):
        (tmp_path / f"part_{number}.py").touch()
    files = sorted(tmp_path.glob("*.py"))
    assert large_parts(files) == [
        f"{tmp_path.as_posix()}: {MAX_MODULES + 1} modules",
        f"{(tmp_path / 'long.py').as_posix()}: {MAX_LINES + 1} lines",
    ]
    assert large_parts(files[:-1]) == large_parts(files)[1:]


def test_the_project_grows_into_no_border():
    """A border falls with what is deleted or moved into a plugin; it is never raised."""
    counts = measures()
    assert {name: counts[name] for name, most in MOST.items() if counts[name] > most} == {}


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


def test_a_method_file_registers_its_method_and_forms_of_it():
    for path in METHOD_FILES:
        registered = registered_in(path)
        first, *forms = (re.sub(r"\W", "_", name) for name in registered)
        assert first == path.stem
        assert all(form.startswith(f"{first}_") for form in forms)
        assert registered[0] in names()


def test_no_method_is_lost():
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


SCHEMA = sorted(PACKAGES["fedpb"].rglob("*.proto"))


def test_everything_in_the_schema_is_explained():
    assert [(path, line) for path in SCHEMA for line in uncommented(path.read_text())] == []
    schema = "message A {\n  int32 a = 1;\n  // b.\n  int32 b = 2;\n  map<a, b> c = 3;  // c.\n}\n"
    assert uncommented(schema) == ["message A {", "int32 a = 1;"]
    assert uncommented("  rpc Join(A) returns (B);") == ["rpc Join(A) returns (B);"]


# -- what is published ----------------------------------------------------------------------------


PLACE = re.compile(r"/(?<![\w.}/]/)(work|root|home|opt|Users|mnt)/")
REGISTRY = re.compile(r"\b(pypi\.org|pythonhosted\.org|registry\.npmjs\.org|deb\.debian\.org)\b")


def private(text: str) -> re.Match[str] | None:
    """Return the first place of a machine, or host of a registry, that a text names."""
    hosts = REGISTRY.search(text) if ".org" in text else None  # it looks at each word
    return PLACE.search(text) or hosts


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


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        if (match := private(text)) is not None
    ]
    assert found == []


def test_no_file_holds_an_unresolved_conflict():
    mark = re.compile(r"^(<{7} |>{7} )", flags=re.MULTILINE)
    assert [name for name, text in tracked_texts() if mark.search(text)] == []


def test_machines_and_registries_are_seen():
    assert private("see " + "/work/" + "main")
    assert private("/home/" + "me")
    assert private("https://" + "pypi.org" + "/simple")
    assert not private("benchmarks/work/x and ../root/x")
