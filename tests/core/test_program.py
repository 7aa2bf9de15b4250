"""Programs: whatever the sizes, the order and the slots, the plan is legal; what breaks its law is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lamina.core.arena import Demand, Packing, pack
from lamina.core.program import Conflicts, Op, Program, Step, UnitTraits, move_gathers_ahead, plan_step

GOLDEN = Path(__file__).parents[1] / "golden"
SLOTS = st.integers(1, 5)
AHEAD = st.integers(0, 4)
ONE_IN_FIVE = st.integers(0, 4).map(lambda number: number == 0)
STEPS = st.lists(st.builds(Step, st.sampled_from(Op), st.integers(0, 2)), max_size=12)

Plan = tuple[list[UnitTraits], Packing]


@st.composite
def plans(draw: st.DrawFn, max_units: int = 9) -> Plan:
    """Units of any size and kind, perhaps with a root around them."""
    sizes_bytes = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=max_units))
    flags = st.builds(UnitTraits, trainable=st.booleans(), resident=ONE_IN_FIVE, is_lookup=ONE_IN_FIVE)
    traits = [draw(flags) for _ in sizes_bytes]
    if draw(st.booleans()):
        traits[0] = UnitTraits(trainable=draw(st.booleans()), resident=True, encloses=True)
    demands = [Demand(f"u{i}", s, t.resident) for i, (s, t) in enumerate(zip(sizes_bytes, traits, strict=True))]
    return traits, pack(demands, draw(SLOTS))


def trainable(traits: Sequence[UnitTraits]) -> list[int]:
    return [unit for unit, t in enumerate(traits) if t.trainable]


def lookups(traits: Sequence[UnitTraits]) -> list[int]:
    return [unit for unit, t in enumerate(traits) if t.is_lookup]


def blocks(count: int, slots: int) -> Plan:
    return [UnitTraits()] * count, pack([Demand(f"block{i}", 1000, resident=False) for i in range(count)], slots)


def uses(program: Program) -> list[Step]:
    return [step for step in program.steps if not step.op.is_collective]


def is_legal(steps: Sequence[Step], conflicts: Conflicts, needless: Sequence[int] = ()) -> bool:
    """Note [Program order] once more, read as sentences about pairs of steps; the oracle of `check()`."""

    def between(begin: int, end: int) -> range:
        return range(begin + 1, end)

    def last(end: int, unit: int, ops: Sequence[Op]) -> int | None:
        return max((i for i in range(end) if steps[i].unit == unit and steps[i].op in ops), default=None)

    def leaves_gradients(position: int) -> bool:
        step = steps[position]
        later = [other.op for other in steps[position + 1 :] if other.unit == step.unit and other.op is not Op.GATHER]
        return step.op is Op.BACKWARD and later[:1] == [Op.REDUCE]

    def reads_weights(position: int) -> bool:
        op, unit = steps[position].op, steps[position].unit
        return op is Op.FORWARD or (op is Op.BACKWARD and unit not in needless)

    def writes(position: int) -> bool:
        return steps[position].op is Op.GATHER or leaves_gradients(position)

    for position, step in enumerate(steps):
        unit, sharing = step.unit, set(conflicts(step.unit))
        if reads_weights(position):
            gather = last(position, unit, [Op.GATHER])
            if gather is None or Step(Op.REDUCE, unit) in steps[gather:position]:
                return False
            for other in between(gather, position):
                if steps[other].unit in sharing and (writes(other) or reads_weights(other)):
                    return False
        if step.op is Op.REDUCE:
            use = last(position, unit, [Op.FORWARD, Op.BACKWARD, Op.REDUCE])
            if use is None or steps[use].op is not Op.BACKWARD:
                return False
            if any(steps[other].unit in sharing | {unit} and writes(other) for other in between(use, position)):
                return False
    return True


def refused(
    steps: Sequence[Step], conflicts: Conflicts, must_reduce: Sequence[int] = (), needless: Sequence[int] = ()
) -> bool:
    try:
        Program(tuple(steps)).check(conflicts, trainable=must_reduce, lookups=needless)
    except AssertionError:
        return True
    return False


@given(plans(), AHEAD)
@settings(max_examples=200, deadline=None)
def test_every_plan_is_legal(plan: Plan, ahead: int) -> None:
    traits, packing = plan
    program = plan_step(traits, packing.conflicts, ahead)
    program.check(packing.conflicts, trainable=trainable(traits), lookups=lookups(traits))
    assert is_legal(program.steps, packing.conflicts, lookups(traits))


@given(plans(), AHEAD)
@settings(max_examples=100, deadline=None)
def test_every_unit_is_used_twice_and_reduced_once(plan: Plan, ahead: int) -> None:
    traits, packing = plan
    program = plan_step(traits, packing.conflicts, ahead)
    enclosing = [u for u, t in enumerate(traits) if t.encloses]
    inner = [u for u, t in enumerate(traits) if not t.encloses]
    assert uses(program) == [Step(Op.FORWARD, u) for u in enclosing + inner] + [
        Step(Op.BACKWARD, u) for u in enclosing + inner[::-1]
    ]
    for unit, t in enumerate(traits):
        assert program.count(Op.REDUCE, unit) == t.trainable
        assert program.count(Op.GATHER, unit) in ((1,) if t.resident or t.is_lookup else (1, 2))


@given(plans(), AHEAD)
@settings(max_examples=100, deadline=None)
def test_text_and_list_are_the_same_thing(plan: Plan, ahead: int) -> None:
    program = plan_step(*(plan[0], plan[1].conflicts), ahead)
    assert Program.parse(program.text()) == program


@given(STEPS)
def test_any_program_survives_its_text(steps: list[Step]) -> None:
    assert Program.parse(Program(tuple(steps)).text()).steps == tuple(steps)


@pytest.mark.parametrize("text", ["AG", "XX0", "0", "AG-1", "ag0", "AG0,FWD0"])
def test_what_is_no_step_is_not_parsed(text: str) -> None:
    with pytest.raises(ValueError):
        Program.parse(text)


@given(st.integers(1, 16), SLOTS, AHEAD)
@settings(max_examples=100, deadline=None)
def test_equal_blocks_need_2n_less_k_gathers(count: int, slots: int, ahead: int) -> None:
    traits, packing = blocks(count, slots)
    program = plan_step(traits, packing.conflicts, ahead)
    assert program.count(Op.GATHER) == 2 * count - min(slots, count)
    assert program.count(Op.REDUCE) == count


@given(plans())
@settings(max_examples=60, deadline=None)
def test_moving_gathers_ahead_changes_places_only(plan: Plan) -> None:
    traits, packing = plan
    lazy = plan_step(traits, packing.conflicts, ahead=0)
    for ahead in range(4):
        moved = Program(move_gathers_ahead(lazy.steps, packing.conflicts, ahead))
        for kind in (lambda s: s.op is Op.GATHER, lambda s: s.op is not Op.GATHER):
            assert list(filter(kind, moved.steps)) == list(filter(kind, lazy.steps))
        for position, step in enumerate(moved.steps):
            if step.op is Op.GATHER:
                following = uses(Program(moved.steps[position:]))
                assert following.index(next(s for s in following if s.unit == step.unit)) <= max(ahead - 1, 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), SLOTS, AHEAD, st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_of_uses_stays_legal(order: list[int], slots: int, ahead: int, data: st.DataObject) -> None:
    """Orders that the arena was not packed for, with units used several times: on-demand gathers, then moved ahead."""
    _, packing = blocks(6, slots)
    backward = data.draw(st.permutations(order))
    sequence = [Step(Op.FORWARD, u) for u in order] + [Step(Op.BACKWARD, u) for u in backward]
    steps: list[Step] = []
    alive: set[int] = set()
    for position, step in enumerate(sequence):
        if step.unit not in alive:
            steps.append(Step(Op.GATHER, step.unit))
            alive = (alive - set(packing.conflicts(step.unit))) | {step.unit}
        steps.append(step)
        if step not in sequence[position + 1 :] and step.op is Op.BACKWARD:
            steps.append(Step(Op.REDUCE, step.unit))
            alive.discard(step.unit)
    Program(tuple(steps)).check(packing.conflicts, trainable=set(order))
    moved = move_gathers_ahead(steps, packing.conflicts, ahead)
    Program(moved).check(packing.conflicts, trainable=set(order))
    assert is_legal(moved, packing.conflicts)


def others_of_three(unit: int) -> list[int]:
    """All three units share bytes."""
    return [other for other in range(3) if other != unit]


def parsed(text: str) -> list[Step]:
    return list(Program.parse(text).steps)


ALL_PAIRS = {(0, 1), (0, 2), (1, 2)}


@given(STEPS, st.sets(st.sampled_from(sorted(ALL_PAIRS))), st.sets(st.integers(0, 2)))
@example(parsed("AG0 FWD0 AG1 BWD0 FWD1"), ALL_PAIRS, {0, 1})
@example(parsed("AG0 FWD0 AG1 BWD0 FWD1 RS0"), ALL_PAIRS, {0, 1})
@settings(max_examples=400, deadline=None)
def test_check_is_the_law_and_nothing_else(steps: list[Step], pairs: set[tuple[int, int]], needless: set[int]) -> None:
    def conflicts(unit: int) -> list[int]:
        return [a if b == unit else b for a, b in pairs if unit in (a, b)]

    assert refused(steps, conflicts, needless=sorted(needless)) == (not is_legal(steps, conflicts, sorted(needless)))


@pytest.mark.parametrize(
    "text",
    [
        "AG0 FWD0 AG1 BWD0 FWD1",  # the lookup is frozen, or has a further use: its backward touches no bytes
        "AG0 FWD0 AG1 FWD1 BWD0 AG0 FWD0 BWD0 RS0",
        "AG0 FWD0 AG1 FWD1 BWD1 BWD0 RS0",  # unit 1 is frozen: its weights lie there, and nobody needs them any more
        "AG0 FWD0 AG1 FWD1 BWD0 RS0 AG1 BWD1 RS1",
        "AG0 FWD0 AG1 FWD1 BWD0 BWD1 RS1",
    ],
)
def test_the_backward_of_a_lookup_may_run_whoever_lies_in_its_place(text: str) -> None:
    program = Program.parse(text)
    program.check(others_of_three, lookups=[0])
    assert is_legal(program.steps, others_of_three, [0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("AG0 FWD0 AG1 BWD0 FWD1 RS0", "FWD1 at 4 finds its weights overwritten or let go by BWD0 at 3"),
        ("AG0 FWD0 AG1 FWD1 BWD0 RS0 BWD1 RS1", "BWD1 at 6 finds its weights overwritten or let go by BWD0 at 4"),
        ("AG0 FWD0 AG1 FWD1 BWD1 BWD0 RS1 RS0", r"BWD0 at 5 would overwrite gradients of \[1\] that wait"),
        ("AG2 FWD2 AG0 FWD0 BWD0 BWD2 RS2 RS0", r"BWD2 at 5 would overwrite gradients of \[0\] that wait"),
    ],
)
def test_gradients_of_a_lookup_over_what_is_needed_are_refused(text: str, message: str) -> None:
    program = Program.parse(text)
    with pytest.raises(AssertionError, match=message):
        program.check(others_of_three, lookups=[0, 2])
    assert not is_legal(program.steps, others_of_three, [0, 2])


@given(plans(max_units=4), AHEAD, st.data())
@settings(max_examples=200, deadline=None)
def test_check_is_the_law_close_to_legal_programs(plan: Plan, ahead: int, data: st.DataObject) -> None:
    traits, packing = plan
    steps = list(plan_step(traits, packing.conflicts, ahead).steps)
    source = data.draw(st.integers(0, len(steps) - 1))
    step = steps[source] if data.draw(st.booleans()) else steps.pop(source)
    steps.insert(data.draw(st.integers(0, len(steps))), step)  # a step repeated or moved anywhere
    needless = data.draw(st.sampled_from([[], lookups(traits)]))
    assert refused(steps, packing.conflicts, needless=needless) == (not is_legal(steps, packing.conflicts, needless))


@given(plans(), AHEAD, st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_programs_are_refused(plan: Plan, ahead: int, data: st.DataObject) -> None:
    """One change each that would give wrong numbers without an error."""
    traits, packing = plan
    steps = list(plan_step(traits, packing.conflicts, ahead).steps)
    must_reduce, needless = trainable(traits), lookups(traits)
    position = data.draw(st.integers(0, len(steps) - 1))
    step = steps[position]
    without = steps[:position] + steps[position + 1 :]
    if step.op is Op.GATHER:
        use = next(i for i in range(position, len(without)) if without[i].unit == step.unit)
        assert refused(without, packing.conflicts, must_reduce, needless)  # never gathered
        late = [*without[: use + 1], step, *without[use + 1 :]]
        assert refused(late, packing.conflicts, must_reduce, needless)
    elif step.op is Op.REDUCE:
        assert refused(without, packing.conflicts, must_reduce, needless)  # never reduced
        assert refused([step, *without], packing.conflicts, must_reduce, needless)  # before its backward
        assert refused([*steps, step], packing.conflicts, must_reduce, needless)  # twice
    elif step.op is Op.BACKWARD and traits[step.unit].trainable:
        assert refused(without, packing.conflicts, must_reduce, needless)  # a reduction of nothing
        again = [*steps[: position + 1], Step(Op.GATHER, step.unit), *steps[position + 1 :]]
        assert refused(again, packing.conflicts, must_reduce, needless)


@given(plans(), AHEAD, st.data())
@settings(max_examples=150, deadline=None)
def test_a_gather_into_bytes_that_are_needed_is_refused(plan: Plan, ahead: int, data: st.DataObject) -> None:
    traits, packing = plan
    steps = list(plan_step(traits, packing.conflicts, ahead).steps)
    position = data.draw(st.integers(0, len(steps) - 1))
    step = steps[position]
    sharing = packing.conflicts(step.unit)
    assume(sharing and not (step.op is Op.BACKWARD and traits[step.unit].is_lookup))
    intruder = Step(Op.GATHER, data.draw(st.sampled_from(sharing)))
    if step.op is Op.REDUCE or not step.op.is_collective:  # directly before a use, or before a reduction
        wrong = [*steps[:position], intruder, *steps[position:]]
    else:
        wrong = [*steps[: position + 1], intruder, *steps[position + 1 :]]
    assert refused(wrong, packing.conflicts, needless=lookups(traits))


def test_resident_units_need_no_gather() -> None:
    program = Program.parse("FWD0 BWD0 RS0")
    with pytest.raises(AssertionError, match="FWD0 at 0 finds its weights never gathered"):
        program.check(lambda unit: ())
    program.check(lambda unit: (), resident=[0], trainable=[0])


def test_a_frozen_unit_is_not_reduced_and_a_trainable_one_must_be() -> None:
    program = Program.parse("AG0 FWD0 BWD0")
    program.check(lambda unit: ())
    with pytest.raises(AssertionError, match=r"units \[0\] are never reduced"):
        program.check(lambda unit: (), trainable=[0])


def golden_programs() -> dict[str, Program]:
    three, three_packing = blocks(3, 3)
    two_slots, two_slots_packing = blocks(5, 2)
    sizes_bytes = [300, 5000, *[3000] * 4, 5000]  # root, embedding, four blocks, head
    model_packing = pack([Demand(f"u{i}", s, resident=i == 0) for i, s in enumerate(sizes_bytes)], 3)
    model = [UnitTraits(resident=True, encloses=True), UnitTraits(is_lookup=True)] + [UnitTraits()] * 5
    return {
        "three_units": plan_step(three, three_packing.conflicts),
        "two_slots": plan_step(two_slots, two_slots_packing.conflicts),
        "root_embedding_blocks_head": plan_step(model, model_packing.conflicts),
    }


@pytest.mark.parametrize("name", ["three_units", "two_slots", "root_embedding_blocks_head"])
def test_golden_programs(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    program = golden_programs()[name]
    assert program.text() + "\n" == text
    assert Program.parse(text) == program


def test_the_program_on_the_page_on_plans_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(snippet, "docs/plans.md", "exec"), {})
