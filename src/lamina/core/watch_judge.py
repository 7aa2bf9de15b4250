"""Who waits for whom, and whether that can end: from reports of all ranks to a verdict. Pure.

Timeouts (torch's, NCCL's watchdog) call whatever is slow a hang, and name nobody. Here a hang is a fact about two
moments: the same ranks blocked in the same calls at both, each for one that is blocked too, has ended, or is stopped. A
rank that computes, compiles, loads or sits in a debugger is none of these, however long it takes.

Note [Proof]
    1. "r waits for s": r is blocked, and has issued a collective on a group of both that s has not (torch counts them
       for each group). Bytes under way, however slow, are no such wait: there, all have issued.
    2. All ranks issue in one order (Note [One order] in engine.py). So of two ranks only one can be ahead of the other;
       ranks that wait for each other, directly or in a circle, have parted for good.
    3. Ranks that opened different phases under one number have parted, whether blocked or not.
    4. One who has ended or is stopped issues nothing more. One who ended well harms only those who wait for it by 1.
    5. One who has dropped a model issues nothing more for it, and goes on with whatever else there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

ORDER, DIED, ENDED, STOPPED, OWN_CALL = "LAM-H1", "LAM-H2", "LAM-H3", "LAM-H4", "LAM-H5"
ALL_SAME_S = 30.0  # all ranks blocked in one group without proof: after this long the places of their steps must agree
CURE = (
    "Forward, backward and step must follow in the same order on every rank; evaluating, saving or skipping a step on "
    "some ranks only is the usual cause, or loops of unequal length (episodes, generation): let these run on a plain "
    "copy"
)
LEAVES = "leaves its program for"  # what a rank does that needs more than ranks have agreed on
_CURE_OF_LEAVING = (
    "A rank has used layers more often or in another order than every rank did in the steps before, and the others no "
    "longer gather for it. Type transport='peer', with which each rank gathers for itself, a larger slots=, or "
    "`with lamina.keep(...)` around such layers"
)
_CURE_OF_SEVERAL_MODELS = (
    "They wait for each other in different models: one backward goes through several sharded models, and ranks take "
    "different paths through them. Make them parts of one module whose forward calls them, and shard that one"
)


def cure_of(said: str) -> str:
    """What to do about ranks that have parted, of which `said` tells what each does."""
    return _CURE_OF_LEAVING if LEAVES in said else CURE


@dataclass(frozen=True)
class Limits:
    """How long things may take before anyone looks at them; nothing is called a hang for its length."""

    silent_s: float = 3.0  # a wait shorter than this is nobody's business
    proof_s: float = 1.5  # between the two moments of a proof
    stopped_s: float = 5.0  # a process may be stopped (SIGSTOP, Ctrl-Z) for so long while others wait for it
    grace_s: float = 2.0  # from a verdict until a call that does not return is cut off, and once more until the exit
    beat_s: float = 1.0  # between two reports of one rank


@dataclass(frozen=True)
class Wait:
    """What a rank is blocked in."""

    number: int  # tells it from the same rank's next one
    kind: str  # "lamina" (its thread looks up now and then), "call" (into torch.distributed), "device"
    for_s: float
    control: str = ""  # name of the agreement (one a model) in which it waits
    group: str = ""  # of a call into torch.distributed, where it is known
    missing: tuple[int, ...] = ()  # ranks that are known to be waited for; () where the groups' counts tell


@dataclass(frozen=True)
class GroupCount:
    """Collectives that a rank has issued on a group."""

    issued: int
    ours: bool  # made by lamina


@dataclass(frozen=True)
class Report:
    """One rank, as it describes itself about once a second."""

    rank: int
    beat: int  # number of the report
    place: str  # "step 12 backward"
    doing: str  # "reduces `layers.3`"
    site: str  # "train.py:88"
    wait: Wait | None = None
    groups: dict[str, GroupCount] = field(default_factory=dict)
    phases: dict[str, dict[int, str]] = field(default_factory=dict)  # the last ones, by control and number
    dropped: tuple[str, ...] = ()  # controls whose model is gone here
    left: str = ""  # how the process ended its work; "" while it runs
    failed: bool = False  # it ended by an exception
    near: dict[int, str] = field(default_factory=dict)  # peers on this host that are dead or stopped
    lost: str = ""  # what torch said when a connection of a collective broke

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | bytes) -> Report:
        raw = json.loads(text)
        wait = raw.pop("wait")
        groups = {name: GroupCount(**counted) for name, counted in raw.pop("groups").items()}
        phases = {c: {int(n): key for n, key in numbered.items()} for c, numbered in raw.pop("phases").items()}
        near = {int(rank): how for rank, how in raw.pop("near").items()}
        raw["dropped"] = tuple(raw["dropped"])
        if wait is not None:
            wait = Wait(**{**wait, "missing": tuple(wait["missing"])})
        return Report(**raw, wait=wait, groups=groups, phases=phases, near=near)


@dataclass(frozen=True)
class Verdict:
    """A hang, said once for all ranks."""

    text: str
    code: str
    waits: dict[int, int] = field(default_factory=dict)  # number of the wait that will not end, by rank
    controls: tuple[str, ...] = ()  # agreements that are broken for good
    cause: str = ""  # "left 1": rank 1 has said itself what went wrong

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | bytes) -> Verdict:
        raw = json.loads(text)
        waits = {int(rank): number for rank, number in raw.pop("waits").items()}
        return Verdict(raw["text"], raw["code"], waits, tuple(raw["controls"]), raw["cause"])


def judge(
    before: Mapping[int, Report], now: Mapping[int, Report], limits: Limits, silence_counts: bool = False
) -> Verdict | None:
    """What two looks at all ranks, some time apart, prove. None: somebody is merely slow, or nobody waits.

    Args:
        silence_counts: the looks are so far apart that a rank which has not reported in between is gone, if connections
            broke as well. Silence alone proves nothing: a rank may be deep in a call that lets no thread run.
    """
    stuck = {r: report for r, report in now.items() if _is_stuck(before.get(r), report, limits)}
    if not stuck:
        return None
    return (
        _ended(before, now, stuck, silence_counts)
        or _circle(stuck)
        or _parted(now, stuck)
        or (_places(now, stuck) if all(_for_s(report) > ALL_SAME_S for report in stuck.values()) else None)
    )


def _for_s(report: Report) -> float:
    assert report.wait is not None
    return report.wait.for_s


def _is_stuck(before: Report | None, now: Report, limits: Limits) -> bool:
    if now.wait is None or now.left:
        return False
    if now.lost:
        return True
    if before is None or before.wait is None or now.beat <= before.beat:
        return False
    return now.wait.number == before.wait.number and now.groups == before.groups and now.wait.for_s >= limits.silent_s


def waits_for(report: Report, other: Report) -> bool:
    """Note [Proof] 1. A report knows the groups of its own rank only, so one in both has both as members."""
    missing, counts = _awaited(report)
    if missing:
        return other.rank in missing
    return any(name in other.groups and issued > other.groups[name].issued for name, issued in counts.items())


def _awaited(report: Report) -> tuple[tuple[int, ...], dict[str, int]]:
    """Ranks that are waited for, or else how far ranks must have come in each group not to be."""
    wait = report.wait
    if wait is None or wait.missing:
        return (() if wait is None else wait.missing), {}
    matters = {n: g for n, g in report.groups.items() if (n == wait.group if wait.kind == "call" else g.ours)}
    return (), {name: group.issued for name, group in matters.items()}


# ---- the rules -----------------------------------------------------------------------------------------------------


def _ended(
    before: Mapping[int, Report], now: Mapping[int, Report], stuck: Mapping[int, Report], silence_counts: bool
) -> Verdict | None:
    """Somebody waits for one who has died, ended or been stopped."""
    near: dict[int, str] = {}
    for report in now.values():
        near |= report.near
    dropped = {rank for rank, report in now.items() if report.left or report.dropped}
    silent = {rank for rank, r in now.items() if silence_counts and rank in before and r.beat <= before[rank].beat}
    for rank in sorted((near.keys() | dropped | silent) & now.keys()):
        other = now[rank]
        waiting = [r for r in stuck.values() if r.rank != rank and _concerns(r, other)]
        if not waiting:
            continue
        last = f", last seen in {_where(other)}"
        code, cause = DIED, ""
        if other.left and other.failed:
            said, code, cause = other.left, ENDED, f"left {rank}"
        elif other.left and any(waits_for(r, other) for r in waiting):
            said, code = f"{other.left}{last}", ENDED
        elif rank in near and not other.left:
            is_stopped = near[rank].startswith("is stopped")
            if is_stopped and not any(rank in report.near for report in before.values()):
                continue
            said, code = f"{near[rank]}{last}", STOPPED if is_stopped else DIED
        elif rank in silent and any(r.lost for r in waiting):
            said = f"is gone (its connections broke and it reports nothing any more){last}"
        elif any(_needs_a_model_of(r, other) and waits_for(r, other) for r in waiting):
            said, code = f"ended or dropped the model{last}", ENDED
        else:
            continue
        text = f"rank {rank} {said}. Waiting for it: {describe(waiting)}"
        if code == ENDED and not cause:
            text += ". Where ranks have unequal numbers of batches, iterate `lamina.even(loader)`"
        return Verdict(text, code, _numbers(stuck.values()), _controls(waiting), cause)
    return None


def _needs_a_model_of(report: Report, other: Report) -> bool:
    """Whether it waits in a collective of a model that the other has dropped. To the user's own it may still come."""
    wait = report.wait
    if wait is None or wait.control not in other.dropped:
        return False
    return wait.kind != "call" or any(report.groups[name].ours for name in _awaited(report)[1])


def _concerns(report: Report, other: Report) -> bool:
    """Whether they share a group, or the other has said nothing yet that would exclude it."""
    wait = report.wait
    if wait is not None and wait.missing:
        return other.rank in wait.missing
    theirs = {name for name, group in other.groups.items() if group.ours}
    return not theirs.isdisjoint(report.groups) or not theirs or waits_for(report, other)


def _circle(stuck: Mapping[int, Report]) -> Verdict | None:
    """Note [Proof] 2: the ranks of which each waits for another of them."""
    left = dict(stuck)
    while True:
        least: dict[str, int] = {}
        for report in left.values():
            for name, group in report.groups.items():
                least[name] = min(group.issued, least.get(name, group.issued))
        kept = {rank: report for rank, report in left.items() if _waits_for_any(report, left, least)}
        if len(kept) == len(left):
            break
        left = kept
    if not left:
        return None
    broken = {report.wait.control for report in left.values() if report.wait is not None} - {""}
    concerned = {rank for rank, report in stuck.items() if report.wait is not None and report.wait.control in broken}
    reports = [stuck[rank] for rank in sorted(left.keys() | concerned)]
    calls = [r for r in reports if r.wait is not None and r.wait.kind == "call"]
    said = describe(reports)
    if calls:
        cure = "All ranks of a group must come to its collectives in the same order: call it on every rank, or on none"
    elif len(_controls(reports)) > 1 and all("backward" in report.place for report in reports):
        cure = _CURE_OF_SEVERAL_MODELS
    else:
        cure = cure_of(said)
    text = f"ranks disagree: {said}. {cure}"
    return Verdict(text, OWN_CALL if calls else ORDER, _numbers(reports), _controls(reports))


def _waits_for_any(report: Report, others: Mapping[int, Report], least: Mapping[str, int]) -> bool:
    """Whether it waits for any of `others`, of which `least` is the smallest count in each group."""
    missing, counts = _awaited(report)
    return any(rank in others for rank in missing) or any(issued > least[name] for name, issued in counts.items())


def _parted(now: Mapping[int, Report], stuck: Mapping[int, Report]) -> Verdict | None:
    """Note [Proof] 3."""
    for control in sorted({report.wait.control for report in stuck.values() if report.wait is not None}):
        began: dict[int, dict[str, list[int]]] = {}  # ranks, by number and by what they began under it
        for report in now.values():
            for number, key in report.phases.get(control, {}).items():
                began.setdefault(number, {}).setdefault(key, []).append(report.rank)
        for number in sorted(began):
            if len(began[number]) > 1:
                said = "; ".join(f"{name_ranks(ranks)} began {key}" for key, ranks in began[number].items())
                reports = [report for report in stuck.values() if report.wait and report.wait.control == control]
                said += f". {describe(reports)}"
                text = f"ranks disagree: {said}. {cure_of(said)}"
                return Verdict(text, ORDER, _numbers(reports), (control,))
    return None


def _places(now: Mapping[int, Report], stuck: Mapping[int, Report]) -> Verdict | None:
    """The last resort: all have been blocked for very long, at different places of their steps."""
    if len(stuck) < len(now) or len({report.place for report in stuck.values()}) == 1:
        return None
    reports = [stuck[rank] for rank in sorted(stuck)]
    said = describe(reports)
    return Verdict(f"ranks disagree: {said}. {cure_of(said)}", ORDER, _numbers(reports), _controls(reports))


# ---- words ---------------------------------------------------------------------------------------------------------


def describe(reports: Sequence[Report]) -> str:
    """ "step 12 backward: rank 0 reduces `layers.3` (train.py:88), rank 1 gathers `layers.4` (train.py:91)"."""
    places = {report.place for report in reports}
    said: dict[tuple[str, str, str], list[int]] = {}
    for report in reports:
        said.setdefault((report.place, report.doing, report.site), []).append(report.rank)
    parts = []
    for (place, doing, site), ranks in said.items():
        where = f" ({site})" if site else ""
        does = doing if len(ranks) == 1 else _do(doing)
        parts.append(
            f"{name_ranks(ranks)} {does}{where}"
            if len(places) == 1
            else f"{name_ranks(ranks)} in {place} {does}{where}"
        )
    text = ", ".join(parts) if len(places) == 1 else "; ".join(parts)
    return f"{places.pop().rstrip(',')}: {text}" if len(places) == 1 else text


def _do(doing: str) -> str:
    """What several do: "reduces `a`" becomes "reduce `a`"."""
    verb, space, rest = doing.partition(" ")
    return verb.removesuffix("s") + space + rest


def _where(report: Report) -> str:
    doing = "" if report.wait is None else f": {report.doing}"
    return f"{report.place.rstrip(',')}{doing}" + (f" ({report.site})" if report.site else "")


def _numbers(reports: Iterable[Report]) -> dict[int, int]:
    return {report.rank: report.wait.number for report in reports if report.wait is not None}


def _controls(reports: Iterable[Report]) -> tuple[str, ...]:
    return tuple(sorted({report.wait.control for report in reports if report.wait and report.wait.control}))


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-7", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
