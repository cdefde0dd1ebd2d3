# SPDX-License-Identifier: Apache-2.0
"""What ranks write for each other beside objects: it is read as it was meant, or refused."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from usbyte.errors import MismatchError
from usbyte.torch.eager.descriptors import Descriptor, MatchResult, match
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.fault.report import behind, last_operations, read_state
from usbyte.torch.runtime.messages import read

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz" / "python"))
import fuzz_descriptors

DESCRIPTORS = [
    Descriptor(0, "allreduce", ["float32"], [[2, 3]], op="sum"),
    Descriptor(1, "allgather", ["int64", "bool"], [[2, 3], [0]]),
    Descriptor(2, "sparse_allreduce", ["int64", "float16"], [[4, 1], [4]], "average", whole=[9]),
    Descriptor(3, "broadcast", ["uint8"], [[]], root=0),
    Descriptor(4, "reducescatter", ["float64"], [[5]], "max", (0.5, 2.0)),
    Descriptor(5, "alltoall", ["int32"], [[3, 1]], splits=[1, 2]),
    Descriptor(6, "barrier"),
    Descriptor(7, "broadcast_bytes", ["uint8"], [[7]], root=7),
]
VERDICTS = [
    MatchResult("user:x", "the ranks disagree"),
    MatchResult("auto:y", sizes=[1, 2]),
    MatchResult("user:z", join_with_zeros=DESCRIPTORS[0]),
]
STATE = {
    "optimizers": {
        "optimizer.1": {
            "step": 3,
            "phase": "backward",
            "awaited": ["weight"],
            "completed": 1,
            "ops": 2,
            "last": [{"step": 3, "op": "all_reduce", "launched_s": 0.5, "took_s": None}],
        },
        "optimizer.2": {},
        "optimizer.3": {"step": 4, "phase": "averaging"},
    },
    "eager": ["allreduce 'x'"],
}


@dataclass(frozen=True)
class Row:
    name: str
    sizes: list[int]
    cost: float = 0.0


def test_messages_are_read_as_their_kind():
    kind = tuple[str, int, float, int | None]
    assert read("m", b'["a", 1, 2, null]', kind) == ("a", 1, 2.0, None)
    assert read("m", '{"name": "a", "sizes": [1]}', Row) == Row("a", [1])
    assert read("m", '{"x": [[true]]}', dict[str, list[list[bool]]]) == {"x": [[True]]}
    assert read("m", '[{"any": 1}]', list[Any]) == [{"any": 1}]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", int), ("nul", int), (b"\xff", str), ("[" * 100_000, list[Any]), ("9" * 5000, int),
        ("true", int), ("1.0", int), (str(2**63), int), ("1", str), ("null", str), ("{}", Row),
        ('{"name": 1, "sizes": []}', Row), ('{"name": "a", "sizes": [], "more": 1}', Row),
        ("[1]", tuple[int, int]), ('{"a": 1}', list[int]), ("[]", dict[str, int]),
        ('"x"', int | None),
    ],
)  # fmt: skip
def test_messages_of_another_kind_are_refused(text, kind):
    with pytest.raises(MismatchError, match=r"rank 3's answer cannot be read: .*same version"):
        read("rank 3's answer", text, kind)


def test_descriptors_and_verdicts_arrive_as_they_are():
    for descriptor in DESCRIPTORS:
        found = Descriptor.from_json(descriptor.to_json())
        assert json.loads(found.to_json()) == json.loads(descriptor.to_json())
    for verdict in VERDICTS:
        found = MatchResult.from_json(verdict.to_json())
        assert json.loads(found.to_json()) == json.loads(verdict.to_json())


@pytest.mark.parametrize(
    ("which", "change"),
    [
        (0, {"kind": "other"}), (0, {"dtypes": []}), (0, {"dtypes": ["nn"]}), (0, {"op": ""}),
        (0, {"op": "other"}), (0, {"shapes": [[-1, 3]]}), (0, {"shapes": [[2.0]]}),
        (0, {"factors": [1.0]}), (0, {"more": 1}), (0, {"rank": "0"}), (1, {"shapes": [[], [0]]}),
        (2, {"dtypes": ["int64"], "shapes": [[4, 1]]}), (2, {"whole": [-1]}), (3, {"op": "sum"}),
        (4, {"shapes": [[]]}), (5, {"splits": [1, 1]}), (5, {"splits": [4, -1]}),
        (6, {"dtypes": ["int8"], "shapes": [[1]]}), (7, {"shapes": [[]]}),
    ],
)  # fmt: skip
def test_descriptors_that_nobody_sends_are_refused(which, change):
    fields = json.loads(DESCRIPTORS[which].to_json()) | change
    with pytest.raises(MismatchError, match=r"rank's part .* cannot be read"):
        Descriptor.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    "change", [{"sizes": [-1]}, {"name": 1}, {"join_with_zeros": {}}, {"error": 3}, {"sizes": None}]
)
def test_verdicts_that_nobody_sends_are_refused(change):
    with pytest.raises(MismatchError, match="cannot be read"):
        MatchResult.from_json(json.dumps(json.loads(VERDICTS[1].to_json()) | change))


def test_no_rank_stands_in_for_what_zeros_change():
    fields = json.loads(VERDICTS[2].to_json())
    fields["join_with_zeros"]["op"] = "max"
    with pytest.raises(MismatchError, match="zeros cannot replace"):
        MatchResult.from_json(json.dumps(fields))


def test_ranks_agree_only_on_what_they_can_run():
    two = [Descriptor(r, "broadcast_bytes", ["uint8"], [[7]], root=5) for r in range(2)]
    assert "root rank 5 is not one of ranks 0, 1" in match("user:x", two)[0].error
    three = [Descriptor(r, "alltoall", ["int8"], [[2]], splits=[2]) for r in range(2)]
    assert "1 splits for 2 ranks" in match("user:x", three)[1].error


def test_names_of_different_spaces_never_meet():
    label = "usbyte.join"
    names = [OperationName.user(label), OperationName.auto(label), OperationName.internal(label)]
    names += [name.backward() for name in names] + [OperationName.user("usbyte").part("join")]
    names.append(names[0].backward().backward())
    assert len({name.key for name in names}) == len(names)
    for name in names:
        assert OperationName.from_key(name.key) == name
    assert [name.is_internal for name in names[:3]] == [False, False, True]
    assert OperationName.from_key(OperationName.user("a:b").key).label == "a:b"


def test_answers_that_cannot_be_read_are_told_and_do_not_hide_the_others():
    assert read_state(1, json.dumps(STATE)) == STATE
    for change in [[], {"step": "3"}, {"awaited": 3}, {"last": [{"step": 1}]}, {"phase": None}]:
        broken = json.loads(json.dumps(STATE))
        if change:
            broken["optimizers"]["optimizer.1"] |= change
        else:
            del broken["eager"]
        states = {0: read_state(0, json.dumps(STATE)), 1: read_state(1, json.dumps(broken))}
        assert "the answer of rank 1 cannot be read" in last_operations(states, [])
        behind(states)


def test_changed_messages_are_read_or_refused():
    seeds = [each.to_json() for each in DESCRIPTORS + VERDICTS] + [json.dumps(STATE)]
    draw = random.Random(0)
    for _ in range(2500):
        lines = [bytearray(draw.choice(seeds).encode()) for _ in range(draw.randrange(1, 3))]
        for data in lines:
            for _ in range(draw.randrange(3)):
                place = draw.randrange(len(data))
                swaps = [b"-1", b"9", b"[]", b"null", b"{}", b'"', b"", b"1e99", b"\xff", b"1.5"]
                width = draw.choice([0, 1, 1, draw.randrange(12)])
                data[place : place + width] = draw.choice(swaps)
        fuzz_descriptors.one_input(b"\n".join(map(bytes, lines)))
