"""`adaptive`: the lane that is expected to give most tokens a second with the request on it. No clock, no I/O.

**Score.** A replica of b sequences gives the sum of their tokens over the time of their steps, those of their
prompts included: a learned draft reads prompts too. Its score is what the request adds to that: what it gets, less
what those that run there lose by longer steps.

**Shared cores.** Replicas on the same cores take turns: of m that are busy each has an m-th of the time. Two
half-full batches that take turns give less than the better of them full, so there the question is which lane
all should be on: a replica is judged as if all who could be on it were, as many as the last requests found on
the mean, though now they run elsewhere. Judged by the batches of the moment, a lane that is worse by now would
keep all requests for ever, because the first one to leave halves everybody's time. For the same reason a
request waits where the better lane is full, and does not take the other one, unless its client set a limit to that
or half of the lane is held by requests that are pinned to it.

**Corrections.** What the profile says of a lane is corrected by what it gives while it serves: see `corrections`.

**Hysteresis.** The lane that was chosen last for that kind of text, or on shared cores for any that had a choice,
is left only for one that is better by the margin: of what the request adds, or on shared cores of all they give.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from serving.core.choice import Choice, LaneScore, Why
from serving.core.lane import ReplicaInfo
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.speculation.cost_model import Lengths, Outlook
from serving.core.speculation.estimator import AcceptanceEstimator, DraftOutcome
from serving.core.speculation.reliability import Reliability
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.corrections import Corrections, Promise, Stay
from serving.scheduler.lane_costs import LaneCosts
from serving.scheduler.placement import LeastOutstanding, PlacementPolicy, ReplicaState

KEEP_CHOICES = 20
FORGET = 0.1  # weight of the newest request in the mean of what requests find on shared cores
MAX_REMEMBERED = 1_000  # a client can invent tenants without end
LOOK_AGAIN_S = 15.0  # little is forgotten in so long
MAX_BOUND = 0.5  # share of a lane's slots with requests that may run nowhere else: then nobody waits for it
ANY_TENANT = ""  # no tenant has this name: what is expected of its requests is what is expected of the kind


@dataclass(slots=True)
class _Sequences:
    """Sequences by kind of text, and the tokens of all their prompts and of all their answers."""

    by_kind: dict[TextKind, float] = field(default_factory=dict)
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, other: _Sequences, times: float = 1) -> None:
        for kind, count in other.by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + times * count
        self.prompt_tokens += times * other.prompt_tokens
        self.output_tokens += times * other.output_tokens

    @property
    def count(self) -> float:
        return sum(self.by_kind.values())

    @property
    def mean_lengths(self) -> Lengths:
        """Of one sequence; what rounding left below 0 is none, and an answer has a token at least."""
        count = self.count
        return Lengths(max(0.0, self.prompt_tokens / count), max(1.0, self.output_tokens / count))


@dataclass(frozen=True, slots=True)
class _Found:
    """What requests found on shared cores: a mean that forgets, once it is of more than a few."""

    mean: _Sequences
    num_requests: int = 1

    def after(self, found: _Sequences) -> _Found:
        weight = max(FORGET, 1 / (self.num_requests + 1))
        mean = _Sequences()
        mean.add(self.mean, 1 - weight)
        mean.add(found, weight)
        return _Found(mean, self.num_requests + 1)


@dataclass(slots=True)
class _Replica:
    """What runs on a replica: what may run on other lanes as well, and what may not."""

    info: ReplicaInfo
    free: _Sequences = field(default_factory=_Sequences)
    bound: _Sequences = field(default_factory=_Sequences)
    promise: Promise = field(default_factory=Promise)

    @property
    def num_sequences(self) -> float:
        return self.free.count + self.bound.count


@dataclass(frozen=True, slots=True)
class _Running:
    replica_id: str
    lane: str
    kind: TextKind
    tenant: str
    num_sequences: int
    sequences: _Sequences
    is_free: bool
    num_drafts: int  # k when it came
    predicted: float  # acceptance rate
    stay: Stay | None  # None of one that came before the scheduler


@dataclass(frozen=True, slots=True)
class _Scored:
    state: ReplicaState
    score: LaneScore


@dataclass(slots=True)
class AcceptedTokens:
    """Of finished streams of a lane and kind: as predicted when they were placed, and as observed."""

    predicted: float = 0.0
    observed: int = 0


class Adaptive(PlacementPolicy):
    """`adaptive`: the lane that is expected to give most tokens a second with the request on it. See the module.

    Args:
        lane_costs: of each lane that takes requests which pin none.
        margin: by which another lane must be better than the one that is kept; a share.

    Attributes:
        choices: how many, by lane, kind of text and what decided.
        last_choices: the newest last.
        accepted: by lane and kind of text.
        reliability: by lane; each request in the bin of its predicted acceptance.
        corrections: what lanes give over what their profile says.
    """

    def __init__(self, lane_costs: LaneCosts, margin: float, rng: random.Random) -> None:
        self._costs = {lane: cost for lane, cost in lane_costs.items() if cost is not None}
        self._lanes = frozenset(lane_costs)
        self._margin = margin
        self._least = LeastOutstanding(rng)
        priors = {
            (lane, kind): rates for lane, cost in self._costs.items() for kind, rates in cost.priors.items()
        }
        self._estimator = AcceptanceEstimator(priors)
        self._replicas: dict[str, _Replica] = {}
        self._on_cores: dict[str, dict[str, _Replica]] = {}
        self._found: dict[tuple[str, str], _Found] = {}  # on shared cores, by model
        self._lane_of_cores: dict[tuple[str, str], str] = {}  # chosen last there
        self._running: dict[str, _Running] = {}
        self._last_lane: dict[tuple[str, TextKind], str] = {}
        self._choice: Choice | None = None
        # A request whose lane was chosen over full ones, which `choose` does not see; where, and which lane.
        self._over_full: tuple[str, tuple[str, str], str] | None = None
        # Until something is learnt, or some of it is forgotten.
        self._tokens_per_step: dict[tuple[str, TextKind, str, int], float] = {}
        self._now_s = self._expected_until_s = 0.0
        self.choices: Counter[tuple[str, TextKind, Why]] = Counter()
        self.last_choices: deque[Choice] = deque(maxlen=KEEP_CHOICES)
        self.accepted: dict[tuple[str, TextKind], AcceptedTokens] = {}
        self.reliability: dict[str, Reliability] = {}
        self.corrections = Corrections()

    # What runs where

    def join(self, info: ReplicaInfo) -> None:
        if info.takes_unpinned and info.lane not in self._lanes:
            raise ValueError(
                f"lane {info.lane!r} takes requests that pin none, and nothing is known of its cost"
            )
        self.forget(info.replica_id)
        replica = self._replicas[info.replica_id] = _Replica(info)
        self._on_cores.setdefault(_cores(info), {})[info.replica_id] = replica
        for running in self._running.values():  # of one that was gone for a while
            if running.replica_id == info.replica_id:
                _part(replica, running).add(running.sequences)

    def forget(self, replica_id: str) -> None:
        if replica := self._replicas.pop(replica_id, None):
            del self._on_cores[_cores(replica.info)][replica_id]
            if not self._on_cores[_cores(replica.info)]:
                del self._on_cores[_cores(replica.info)]
                self._found.pop(_place(replica.info), None)
                self._lane_of_cores.pop(_place(replica.info), None)

    def placed(self, request: SchedulingRequest, info: ReplicaInfo, now_s: float) -> None:
        self._keep_up(info, now_s)
        if request.lane is None:
            self._notice(info)
        cost = self._costs.get(info.lane)
        replica = self._replicas[info.replica_id]
        batch = replica.num_sequences + request.num_sequences
        num_drafts = cost.num_drafts(round(batch)) if cost else 0
        expected = self._estimator.expect(info.lane, request.kind, request.tenant, num_drafts, now_s)
        running = _Running(
            info.replica_id,
            info.lane,
            request.kind,
            request.tenant,
            request.num_sequences,
            _sequences_of(request),
            request.lane is None and not request.needs_plain_decoding,
            num_drafts,
            expected.acceptance_rate,
            Stay(replica.promise),
        )
        self._running[request.request_id] = running
        _part(replica, running).add(running.sequences)

    def _notice(self, info: ReplicaInfo) -> None:
        """What a request finds on shared cores: those who could have gone to either lane."""
        if len(self._sharing(info)) == 1:
            return
        found = self._free_now(info)
        key = _place(info)
        known = self._found.get(key)
        # Idle cores say that the load is gone.
        self._found[key] = known.after(found) if known and found.count else _Found(found)

    def _free_now(self, info: ReplicaInfo) -> _Sequences:
        free = _Sequences()
        for replica in self._sharing(info):
            if _is_alike(replica.info, info):
                free.add(replica.free)
        return free

    def adopted(self, lease: Lease) -> None:
        """Of what kind it is, whose, and how long, no lease says."""
        replica = self._replicas.get(lease.replica_id)
        # As much of it in the KV cache as of a request whose answer may be twice its prompt.
        reserved = lease.reserved_tokens
        sequences = _Sequences({TextKind.OPEN: lease.num_sequences}, reserved / 4, reserved / 2)
        running = _Running(
            lease.replica_id,
            replica.info.lane if replica else "",
            TextKind.OPEN,
            ANY_TENANT,
            lease.num_sequences,
            sequences,
            is_free=False,
            num_drafts=0,
            predicted=0.0,
            stay=None,
        )
        self._running[lease.request_id] = running
        if replica is not None:
            _part(replica, running).add(sequences)

    def ended(self, request_id: str, end: RequestEnd, now_s: float) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        replica = self._replicas.get(running.replica_id)
        if replica is not None:
            self._keep_up(replica.info, now_s)
            self._correct(running, end, replica, now_s)
            self._learn(running, end, replica, now_s)
            part = _part(replica, running)
            part.add(running.sequences, -1)
            if part.count == 0:
                part.prompt_tokens = part.output_tokens = 0.0  # what rounding left

    def _keep_up(self, info: ReplicaInfo, now_s: float) -> None:
        """What the profile has promised on these cores since the last event, before who runs there changes.

        One that was adopted, and a replica that came or went, counts from the last event on.
        """
        self._now_s = self.corrections.now_s = now_s
        if now_s > self._expected_until_s:
            self._tokens_per_step.clear()
            self._expected_until_s = now_s + LOOK_AGAIN_S
        busy = [replica for replica in self._sharing(info) if replica.num_sequences]
        for replica in self._sharing(info):
            elapsed_s = replica.promise.since(now_s)
            if elapsed_s and replica.num_sequences:
                there = _Sequences()
                there.add(replica.free)
                there.add(replica.bound)
                if outlook := self._outlook(replica.info, there):
                    replica.promise.add(elapsed_s, outlook.step_s, there.count, len(busy) == 1)

    def _correct(self, running: _Running, end: RequestEnd, replica: _Replica, now_s: float) -> None:
        """What its time says of its lane; of several sequences nobody knows when each ended."""
        if running.stay is None or running.num_sequences > 1 or end.verdict is not ReplicaVerdict.HEALTHY:
            return
        if said := running.stay.slowness(replica.promise, self._num_steps(running, end, replica)):
            self.corrections.learn(running.lane, *said, now_s)

    def _num_steps(self, running: _Running, end: RequestEnd, replica: _Replica) -> float:
        """Of its answer: as counted, so that what was accepted says nothing of its lane's pace.

        Where each row has its own k nothing is learnt of acceptance, so there its pace has to say that too: steps
        are those that its tokens were expected to take, as they are where none were counted.
        """
        cost = self._costs.get(running.lane)
        if cost is None or not end.output_tokens:
            return 0.0
        if cost.max_drafts and not cost.is_by_row and end.num_steps:
            return end.num_steps
        ks = running.num_drafts, cost.num_drafts(round(replica.num_sequences))
        per_step = fmean(self._expected(running.lane, running.kind, running.tenant, k) for k in ks)
        return 1 + (end.output_tokens - 1) / per_step

    def _learn(self, running: _Running, end: RequestEnd, replica: _Replica, now_s: float) -> None:
        """What its steps say of its drafts: all after the first, which gives a token without any.

        Where k changes with the batch, only of a request that came and left at the same k; where each row has its
        own, nothing, for nobody knows what was drafted.
        """
        cost, k = self._costs.get(running.lane), running.num_drafts
        if not k or cost is None or cost.is_by_row or k != cost.num_drafts(round(replica.num_sequences)):
            return
        if end.num_steps is None or end.output_tokens is None:
            return
        steps, tokens = end.num_steps - running.num_sequences, end.output_tokens - running.num_sequences
        if steps < 1:
            return
        # More than steps can give: chunks were merged on the way, and nobody knows of how many steps. A last token
        # of each sequence that has no text makes no chunk, and is none.
        if tokens - steps > k * steps + running.num_sequences:
            return
        accepted = min(max(tokens - steps, 0), k * steps)
        outcome = DraftOutcome.of_counts(steps, accepted, k)
        self._estimator.learn(running.lane, running.kind, running.tenant, outcome, now_s)
        self._tokens_per_step.clear()
        sums = self.accepted.setdefault((running.lane, running.kind), AcceptedTokens())
        sums.predicted += running.predicted * k * steps
        sums.observed += accepted
        self.reliability.setdefault(running.lane, Reliability()).add(running.predicted, accepted, k * steps)

    def sequences_by_replica(self) -> dict[str, float]:
        """What it takes to run on each ready replica."""
        return {name: replica.num_sequences for name, replica in self._replicas.items()}

    # The choice

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        self._choice = None
        if request.lane is not None:
            return self._least.choose(request, candidates)
        if not self._are_known(candidates):
            state = self._least.choose(request, candidates)
            self._remember(Choice(state.info.lane, request.kind, Why.ONLY_CHOICE, ()))
            return state
        arriving = _sequences_of(request)
        scored: list[_Scored] = []
        winners: list[_Scored] = []
        was_kept = False
        for group in _by_cores(candidates).values():
            options = self._scored(request, arriving, group)
            winner, is_kept = self._of_cores(options, request)
            scored += options
            winners.append(winner)
            was_kept = was_kept or is_kept
        if len(winners) > 1:
            last_lane = self._last_lane.get((request.model, request.kind))
            best = self._best(winners, request)
            kept = [winner for winner in winners if winner.score.lane == last_lane]
            chosen = self._best(kept, request) if kept else best
            if best.score.score > chosen.score.score + self._margin * abs(best.score.score):
                chosen = best
            was_kept = chosen.score.score < best.score.score
        else:
            (chosen,) = winners
        self._note(request, scored, chosen, was_kept)
        return chosen.state

    def awaited(
        self,
        request: SchedulingRequest,
        candidates: Sequence[ReplicaState],
        full: Callable[[], Sequence[ReplicaState]],
    ) -> Sequence[ReplicaState]:
        """The best on each cores, if on all that have room the better lane is full: the other would slow it."""
        if request.lane is not None or not all(candidate.info.cores for candidate in candidates):
            return ()
        if not self._are_known(candidates):
            return ()
        self._over_full = None
        full_there = _by_cores(full())
        arriving = _sequences_of(request)
        winners: list[ReplicaState] = []
        for cores, group in _by_cores(candidates).items():
            waited_for = full_there.get(cores)
            if waited_for is None:
                return ()
            winner, _ = self._of_cores(self._scored(request, arriving, [*group, *waited_for]), request)
            # A full replica may win over one of its own lane that has room.
            if winner.score.lane in {candidate.info.lane for candidate in group}:
                if len({state.info.lane for state in (*group, *waited_for)}) > 1:
                    self._over_full = request.request_id, _place(winner.state.info), winner.score.lane
                return ()
            if self._is_bound(winner.score.lane, waited_for):
                return ()
            winners.append(winner.state)
        return winners

    def _is_bound(self, lane: str, full: Iterable[ReplicaState]) -> bool:
        """Whether too many of a lane's slots are held by requests that did not choose it."""
        of_lane = [self._replicas[state.info.replica_id] for state in full if state.info.lane == lane]
        num_slots = sum(replica.info.max_running for replica in of_lane)
        return sum(replica.bound.count for replica in of_lane) >= MAX_BOUND * num_slots

    def _are_known(self, candidates: Sequence[ReplicaState]) -> bool:
        """False where there is one lane only, which need not be measured."""
        return all(candidate.info.lane in self._costs for candidate in candidates)

    def explain(self) -> Choice | None:
        return self._choice

    def _of_cores(self, options: list[_Scored], request: SchedulingRequest) -> tuple[_Scored, bool]:
        """The best replica of those on the same cores, and whether a better one was passed over."""
        best = self._best(options, request)
        if len({option.score.lane for option in options}) == 1:
            return best, False
        lane = self._lane_of_cores.get(_place(best.state.info))
        held = [option for option in options if option.score.lane == lane]
        # Where nothing runs nothing is gained by staying.
        if held and self._free_now(best.state.info).count:
            kept = self._best(held, request)
            if best.score.tokens_per_s <= kept.score.tokens_per_s * (1 + self._margin):
                return kept, kept.score.score < best.score.score
        return best, False

    def _best(self, options: Sequence[_Scored], request: SchedulingRequest) -> _Scored:
        highest = max(option.score.score for option in options)
        equals = {option.state.info.replica_id: option for option in options if option.score.score == highest}
        state = self._least.choose(request, [option.state for option in equals.values()])
        return equals[state.info.replica_id]

    def _note(
        self, request: SchedulingRequest, scored: Sequence[_Scored], chosen: _Scored, was_kept: bool
    ) -> None:
        best_of_lane: dict[str, LaneScore] = {chosen.score.lane: chosen.score}
        for option in scored:
            lane = option.score.lane
            if lane != chosen.score.lane and (
                lane not in best_of_lane or option.score.score > best_of_lane[lane].score
            ):
                best_of_lane[lane] = option.score
        info = chosen.state.info
        if len(best_of_lane) == 1:
            why = Why.ONLY_CHOICE
            was_choice = self._over_full == (request.request_id, _place(info), info.lane)
        else:
            self._last_lane[request.model, request.kind] = info.lane
            why = Why.KEPT if was_kept else Why.SCORE
            # Who may not wait did not see the full ones.
            was_choice = len(self._sharing(info)) > 1 and request.is_patient
        if was_choice:
            self._lane_of_cores[_place(info)] = info.lane
        scores = sorted(best_of_lane.values(), key=lambda each: each.score, reverse=True)
        self._remember(Choice(chosen.score.lane, request.kind, why, tuple(scores)))

    def _remember(self, choice: Choice) -> None:
        self._choice = choice
        self.choices[choice.lane, choice.kind, choice.why] += 1
        self.last_choices.append(choice)

    # Scores

    def _scored(
        self, request: SchedulingRequest, arriving: _Sequences, group: Sequence[ReplicaState]
    ) -> list[_Scored]:
        """Replicas on the same cores: with the request on each, over the best that they could give without it."""
        without = max(self._picture(self._replicas[state.info.replica_id], None, None)[0] for state in group)
        scored = []
        for state in group:
            replica = self._replicas[state.info.replica_id]
            tokens_per_s, there, num_sharing = self._picture(replica, arriving, request)
            batch = there.count
            k = self._costs[state.info.lane].num_drafts(round(batch))
            scored.append(
                _Scored(
                    state,
                    LaneScore(
                        state.info.lane,
                        state.info.replica_id,
                        tokens_per_s - without,
                        tokens_per_s,
                        batch,
                        there.mean_lengths.context_tokens,
                        k,
                        self._expected(state.info.lane, request.kind, request.tenant, k),
                        num_sharing,
                        self.corrections.factor(state.info.lane, min(batch, state.info.max_running)),
                    ),
                )
            )
        return scored

    def _picture(
        self, target: _Replica, arriving: _Sequences | None, request: SchedulingRequest | None
    ) -> tuple[float, _Sequences, int]:
        """All that may be on the target's lane are on the target: tokens/s of its cores, who is there, how many
        replicas take turns."""
        there = self._free(target.info)
        tokens_per_s = 0.0
        num_busy = 0
        for replica in self._sharing(target.info):
            elsewhere = _Sequences()
            elsewhere.add(replica.bound)
            if not _is_alike(replica.info, target.info):
                elsewhere.add(replica.free)
            if replica is target:
                there.add(elsewhere)
            elif elsewhere.count:
                num_busy += 1
                tokens_per_s += self._tokens_per_s(replica.info, elsewhere)
        if arriving is not None:
            there.add(arriving)
        if there.count:
            num_busy += 1
            tokens_per_s += self._tokens_per_s(target.info, there, request)
        return tokens_per_s / max(1, num_busy), there, num_busy

    def _tokens_per_s(
        self, info: ReplicaInfo, sequences: _Sequences, request: SchedulingRequest | None = None
    ) -> float:
        """As corrected, of a replica with those sequences, alone on its cores; `request` is one of them."""
        outlook = self._outlook(info, sequences, request)
        if outlook is None:
            return 0.0
        return outlook.tokens_per_s * self.corrections.factor(info.lane, outlook.batch)

    def _outlook(
        self, info: ReplicaInfo, sequences: _Sequences, request: SchedulingRequest | None = None
    ) -> Outlook | None:
        """By the profile; None of a lane that takes pinned requests alone, and that nobody measured."""
        cost = self._costs.get(info.lane)
        if cost is None:
            return None
        count = sequences.count
        # More than its slots take turns in them.
        batch = min(count, info.max_running)
        k = cost.num_drafts(round(batch))
        tokens = shares = 0.0
        for kind, num_sequences in sequences.by_kind.items():
            tokens += num_sequences * self._expected(info.lane, kind, ANY_TENANT, k)
            shares += num_sequences * cost.share(kind)
        if request is not None:
            of_tenant = self._expected(info.lane, request.kind, request.tenant, k)
            of_kind = self._expected(info.lane, request.kind, ANY_TENANT, k)
            tokens += request.num_sequences * (of_tenant - of_kind)
        return cost.cost.serve_at(batch, sequences.mean_lengths, k, tokens / count, shares / count)

    def _expected(self, lane: str, kind: TextKind, tenant: str, num_drafts: int) -> float:
        """Tokens of a step for one sequence."""
        if not num_drafts:
            return 1.0
        key = (lane, kind, tenant, num_drafts)
        if key not in self._tokens_per_step:
            if len(self._tokens_per_step) >= MAX_REMEMBERED:
                self._tokens_per_step.clear()
            expected = self._estimator.expect(lane, kind, tenant, num_drafts, self._now_s)
            self._tokens_per_step[key] = expected.tokens_per_step
        return self._tokens_per_step[key]

    def _free(self, info: ReplicaInfo) -> _Sequences:
        """Who could be on this replica: who is, or on shared cores the mean of what requests found there."""
        free = self._free_now(info)
        if len(self._sharing(info)) == 1 or not free.count:
            return free
        found = self._found.get(_place(info))
        return found.after(free).mean if found else free

    def _sharing(self, info: ReplicaInfo) -> Collection[_Replica]:
        return self._on_cores[_cores(info)].values()


def _sequences_of(request: SchedulingRequest) -> _Sequences:
    output_tokens = request.predicted_output_tokens or request.max_output_tokens
    return _Sequences({request.kind: request.num_sequences}, request.prompt_tokens, output_tokens)


def _part(replica: _Replica, running: _Running) -> _Sequences:
    return replica.free if running.is_free else replica.bound


def _cores(info: ReplicaInfo) -> str:
    """What it computes on, as a key; one that shares with nobody is its own."""
    return info.cores or f"replica {info.replica_id}"


def _place(info: ReplicaInfo) -> tuple[str, str]:
    """Cores, and whose requests that pin no lane are free to move there."""
    return _cores(info), info.model


def _by_cores(states: Iterable[ReplicaState]) -> dict[str, list[ReplicaState]]:
    by_cores: dict[str, list[ReplicaState]] = {}
    for state in states:
        by_cores.setdefault(_cores(state.info), []).append(state)
    return by_cores


def _is_alike(one: ReplicaInfo, other: ReplicaInfo) -> bool:
    """Whether both take the same requests that pin no lane."""
    return one.takes_unpinned and other.takes_unpinned and one.model == other.model
