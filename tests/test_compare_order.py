"""The order of compared runs: the first is the baseline, the others follow by date, then traces."""

from types import SimpleNamespace

from analysis.compare import document


def test_the_baseline_stays_first_and_others_follow_by_date(monkeypatch):
    def run(name: str, day: int, of_trace: bool = False):
        return SimpleNamespace(name=name, of_trace=of_trace, day=day)

    named = [run("new", 9), run("trace", 0, of_trace=True), run("late", 5), run("early", 1)]
    monkeypatch.setattr(document, "read_runs", lambda folders: named)
    monkeypatch.setattr(document, "compare_read", lambda runs: [run.name for run in runs])
    monkeypatch.setattr(document.ComparedRun, "began", lambda run: run.day)
    assert document.compare([]) == ["new", "early", "late", "trace"]
