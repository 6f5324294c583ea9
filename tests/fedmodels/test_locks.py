"""Each lock of the product names the values that it guards, or says here what else it is for."""

import ast
import importlib
import pkgutil
import threading
from pathlib import Path

import pytest

import fedcli
import fedmodels
import fedpb
import fedplugins
import fedsrv
import fedtide
from fedmodels.host.guarded import Guarded

ROOT = Path(__file__).parents[2]
WITHOUT_VALUES = {
    "fedcli/runtime/enrolment.py Enrolment._joining": "one thread joins again at a time",
    "fedcli/runtime/setups.py SetUps.busy": "no net is built while a client trains",
    "fedcli/predicting/live_model.py LiveModel._reading": "one thread reads a model at a time",
    "fedplugins/serving/site.py Site._is_testing": "one window is tested at a time",
    "fedplugins/queues/service.py FrontService._submitting": "one config is checked at a time",
    "fedsrv/identity/enrolment.py Enrolling._lock": "one certificate is issued at a time",
    "fedsrv/launch/forked.py Forked._reaping": "one thread waits for the process at a time",
    "fedsrv/parts/stages.py OpenRuns._deciding": "a decision is checked and stored as one step",
    "fedsrv/transport/remote_cohort.py RemoteCohort._admitting": "one description at a time",
    "models/fedmodels/host/spans.py Spans._lock": "the ids of a span are drawn for it alone",
    "proto/fedpb/revocation.py RevocationList._reading": "a list is read and its mark noted as one",
}
"""Locks of no value of their object, and what they keep apart."""


def locks():
    """Yield file, class, and attribute of each lock that an object makes, and its marked locks."""
    for room in ("fedsrv", "fedcli", "fedtide", "models", "proto", "fedplugins"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            if "threading" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    yield from of_class(str(path.relative_to(ROOT)), node)


def of_class(place, node):
    marked = {
        call.args[0].value for call in ast.walk(node)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Guarded"
    }  # fmt: skip
    made = {
        target.attr
        for assigned in ast.walk(node) if isinstance(assigned, ast.Assign)
        for target, value in pairs(assigned)
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Call)
        and not (value.args and "Condition" in ast.unparse(value.func))  # over another lock
        and ast.unparse(value.func) in ("threading.Lock", "threading.RLock", "threading.Condition")
    }  # fmt: skip
    for name in made:
        yield f"{place} {node.name}.{name}", name in marked


def pairs(assigned):
    target = assigned.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(assigned.value, ast.Tuple):
        return zip(target.elts, assigned.value.elts, strict=True)
    return [(target, assigned.value)]


def test_each_lock_names_what_it_guards():
    found = dict(locks())
    assert len(found) > 30
    unmarked = {name for name, is_marked in found.items() if not is_marked}
    assert unmarked == WITHOUT_VALUES.keys()


def classes():
    """Yield each class of the product that has marked values, with their marks by name."""
    for package in (fedcli, fedmodels, fedpb, fedplugins, fedsrv, fedtide):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "tests" not in found.name.split(".") and not found.name.endswith("__main__"):
                module = importlib.import_module(found.name)
                for kind in vars(module).values():
                    if isinstance(kind, type) and kind.__module__ == found.name:
                        marks = {n: v for n, v in vars(kind).items() if isinstance(v, Guarded)}
                        yield from [(kind, marks)] if marks else []


def test_each_marked_value_fails_whoever_touches_it_without_its_lock():
    """Another thread may hold the lock meanwhile: what counts is who touches the value."""
    get = eval("lambda one, name: getattr(one, name)", {"__name__": "product"})
    put = eval("lambda one, name: setattr(one, name, 0)", {"__name__": "product"})
    seen = dict(classes())
    assert len(seen) >= 30
    for kind, marks in seen.items():
        for name, mark in marks.items():
            one = object.__new__(kind)
            one.__dict__ |= {mark._lock: threading.RLock(), name: 0}
            held = getattr(one, mark._lock)
            taken, go_on = threading.Event(), threading.Event()

            def hold(held=held, taken=taken, go_on=go_on):
                with held:
                    taken.set()
                    go_on.wait(60)

            other = threading.Thread(target=hold)
            other.start()
            assert taken.wait(60)
            for touch in (get, put):
                line = f"^{kind.__name__}.{name} without {mark._lock}$"
                with pytest.raises(AssertionError, match=line):
                    touch(one, name)
            go_on.set()
            other.join()
            with held:
                put(one, name)
                assert get(one, name) == 0
