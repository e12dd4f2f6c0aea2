"""Steps and the time they took, as the tally counts them."""

from serving.engines.base import EngineTally


def test_steps_in_a_row_are_timed_from_end_to_end() -> None:
    tally = EngineTally()
    for end_s in (10.0, 10.2, 10.5):
        tally.step(1, 0, end_s)
    assert (tally.num_steps, round(tally.busy_s, 9)) == (2, 0.5)


def test_a_pause_ends_when_a_request_joins_and_not_before_its_first_step() -> None:
    tally = EngineTally()
    for end_s in (10.0, 10.1):
        tally.step(1, 0, end_s)
    tally.load(0, 0)  # its client left
    tally.load(1, 0)
    for end_s in (60.0, 60.3):
        tally.step(1, 0, end_s)
    assert (tally.num_steps, round(tally.busy_s, 9)) == (2, 0.4)


def test_a_pause_is_not_a_step() -> None:
    tally = EngineTally()
    tally.step(1, 0, 10.0)
    tally.step(0, 0, 10.1)  # the last request ended with it
    tally.step(1, 0, 60.0)
    assert (tally.num_steps, round(tally.busy_s, 9)) == (1, 0.1)
