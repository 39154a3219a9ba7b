"""Events, counters, timers."""

from __future__ import annotations

import threading
import time

import pytest

from magneto.base import events

pytestmark = pytest.mark.torchfree


def test_events_are_kept_in_order_with_their_fields():
    events.emit("graph", name="a", nodes=3)
    events.emit("break", id="B012")
    assert [e.kind for e in events.events()] == ["graph", "break"]
    (graph,) = events.events("graph")
    assert (graph.name, graph.nodes) == ("a", 3)
    with pytest.raises(AttributeError, match="nodes"):
        graph.nothing  # noqa: B018


def test_counts_survive_the_bound(monkeypatch):
    for _ in range(events.KEPT + 5):
        events.emit("x")
    assert len(events.events("x")) == events.KEPT and events.count("x") == events.KEPT + 5


def test_counters():
    events.counter("hits")
    events.counter("hits", 2)
    assert events.counters() == {"hits": 3}
    events.reset()
    assert events.counters() == {}


def test_timers_subtract_nested_stages():
    with events.timer("outer"):
        time.sleep(0.01)
        with events.timer("inner"):
            time.sleep(0.02)
    outer, inner = events.timings()["outer"], events.timings()["inner"]
    assert inner.total >= 0.02 and outer.total >= 0.03 and outer.own < outer.total - 0.015
    assert (outer.calls, inner.calls) == (1, 1)


def test_recursive_timers_count_wall_time_once():
    with events.timer("same"), events.timer("same"):
        time.sleep(0.01)
    timing = events.timings()["same"]
    assert timing.calls == 2 and 0.01 <= timing.total < 0.02 and timing.own < 0.02


def test_a_timer_ends_with_an_exception():
    with pytest.raises(ValueError), events.timer("failing"):
        raise ValueError
    assert events.timings()["failing"].calls == 1


def test_subscribers_until_they_leave():
    seen = []
    leave = events.subscribe(lambda event: seen.append(event.kind))
    events.emit("a")
    leave()
    events.emit("b")
    assert seen == ["a"]


def test_recording_sees_its_own_thread_only():
    with events.recording() as seen:
        events.emit("mine")
        thread = threading.Thread(target=lambda: events.emit("theirs"))
        thread.start()
        thread.join()
    events.emit("after")
    assert [event.kind for event in seen] == ["mine"]


def test_threads_lose_nothing():
    def work():
        for _ in range(500):
            events.counter("n")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.counters()["n"] == 2000
