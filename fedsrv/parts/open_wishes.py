"""What an operator may want of the classes of an open run: other names, or two made one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError
from fedmodels.facts.class_names import named, near
from fedmodels.facts.run_classes import ClassChange, RunClasses
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile

SHOWN = 60
AS_ONE = ": where both are to be one class, use --merge"


def told_of(classes: RunClasses, profiles: Iterable[Profile]) -> list[rpc.ClassOf]:
    """Return what an operator is told of classes, in label order."""
    examples, clients = Counter[str](), Counter[str]()
    for profile in profiles:
        held = Counter[str]()
        for name, number in zip(classes.called(profile.classes), profile.train.sum(0), strict=True):
            held[name] += int(number)
        examples.update(held)
        clients.update(name for name, number in held.items() if number)
    earlier = dict(zip(classes.earlier, classes.called(classes.earlier), strict=True))
    return [
        rpc.ClassOf(
            name=name, earlier=[old for old, now in earlier.items() if now == name],
            examples=examples[name], clients=clients[name],
            part_of=classes.names[into] if (into := classes.merged.get(label)) is not None else "",
        )
        for label, name in enumerate(classes.names)
    ]  # fmt: skip


def checked(
    classes: RunClasses, change: ClassChange, *, merges: bool = False, coming: Collection[str] = ()
) -> ClassChange:
    """Return a change as the classes of a run can take it.

    Args:
        classes: of the run.
        change: of one of them.
        merges: whether it becomes part of the class that has its new name.
        coming: classes that clients have announced, and the run has not begun.

    Raises:
        PayloadError: the class is none of the run's; another one has the name or had it; or there
            is no class that it could become part of.
    """
    old = printable(change.old, SHOWN)
    _check_present(classes, change.old, coming)
    try:
        now = named(change.now)
    except ValueError as error:
        raise PayloadError(str(error)) from None
    said = printable(now, SHOWN)
    if now == change.old:
        why = "cannot become part of itself" if merges else "is called so already"
        raise PayloadError(f"the class {old!r} {why}")
    if merges and now not in coming:
        _check_present(classes, now)
        return ClassChange(change.old, now)
    if now.isdecimal():
        raise PayloadError(
            f"{now} is a number, which sites may have for another class: give a name"
        )
    label = classes.labels[change.old]
    if now in classes.names and classes.labels[now] == classes.rows[now]:
        raise PayloadError(f"the run has a class {said!r} already{AS_ONE}")
    if now in coming and not merges:
        raise PayloadError(f"a client brings a class {said!r} that the run has not begun{AS_ONE}")
    if now in classes.names or classes.labels.get(now, label) != label:
        (other,) = classes.called([now])
        raise PayloadError(
            f"sites that say {said!r} mean the class {printable(other, SHOWN)!r}, which was called "
            "so before"
        )
    others = [*(name for name, other in classes.labels.items() if other != label), *coming]
    if like := near(now, [name for name in others if name != now]):
        raise PayloadError(
            f"{said!r} differs only in case or spaces from {printable(like, SHOWN)!r}, another "
            "class of the run"
        )
    return ClassChange(change.old, now)


def _check_present(classes: RunClasses, name: str, coming: Collection[str] = ()) -> None:
    """Check that a name is that of a class by now; raise PayloadError."""
    said = printable(name, SHOWN)
    if name not in classes.labels:
        known = ", ".join(printable(name, SHOWN) for name in classes.names[:20])
        why = "has not begun the class" if name in coming else "has no class"
        raise PayloadError(f"the run {why} {said!r}: it has {known}")
    (now,) = classes.called([name])
    if now != name:
        how = "is part of" if name in classes.names else "is called"
        raise PayloadError(f"the class {said!r} {how} {printable(now, SHOWN)!r} by now")
