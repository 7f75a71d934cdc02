"""The answers of traces that are read together are made once, of all that is known by then."""

import pytest
from traces import event, on_gpu, step, write_trace

from analysis import answers
from harness.base.errors import UserError


def small_trace(folder, name="trace.json"):
    return write_trace(folder / name, step(1, 0, 100), event("aten::add", 5, 9))


def test_what_was_not_read_is_part_of_the_answers(tmp_path):
    damaged = tmp_path / "other.json"
    damaged.write_text("{")
    paths = [small_trace(tmp_path), damaged]
    asked = []

    def others(captures):
        asked.append(captures)
        return [UserError("notes.txt: no trace")]

    ((_, own),), refused = answers.analyze_all(paths, others=others)
    assert asked == [set()]
    assert own.not_read == [str(error) for error in refused]
    assert "other.json" in own.not_read[0] and own.not_read[1] == "notes.txt: no trace"
    ((_, alone),), _ = answers.analyze_all(paths[:1])
    assert alone.not_read == []


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_what_communication_costs_is_found_once_for_each_trace(tmp_path, monkeypatch, n_ranks):
    """Also of ranks, whose waiting is known when all have been read."""
    calls = []

    def counted(rows, *rest):
        calls.append(rows)
        return real(rows, *rest)

    real = answers.communication_of_steps
    monkeypatch.setattr(answers, "communication_of_steps", counted)
    paths = []
    for rank in range(n_ranks):
        reduces = on_gpu("ncclDevKernel_AllReduce", 195, 200, 100 + rank, 1)
        world = {"rank": rank, "world_size": n_ranks}
        events = [step(1, 0, 1000), event("aten::mm", 5, 90), *reduces]
        path = tmp_path / f"rank{rank}.json"
        paths.append(write_trace(path, *events, distributedInfo=world))
    analyses, _ = answers.analyze_all(paths)
    assert len(calls) == n_ranks
    for _, own in analyses:
        is_known = own.communication.waiting_ms is not None
        assert is_known == bool(own.ranks) == (n_ranks > 1)
