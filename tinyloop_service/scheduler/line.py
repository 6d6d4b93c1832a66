"""The line: who waits, in order of arrival, and beside it who waits for a quota of his tenant.

    add ──the quota lets him in──► queue ──turn by turn──► starts, or leaves
     └──it does not──► lane of his tenant ──it does by now──► queue, where he would be had he never been in a lane

In: jobs, that is requests and prefixes to build, by their order of arrival.  Out: those whose turn it is.  It refuses
to know memory and rows; `admission` does.

Who is in a lane costs the others nothing: a look at the lanes takes as long as there are tenants in them, a job more or
less takes the same whatever waits.  He keeps no prefix in memory, and he ages from when he is let in.
"""

from __future__ import annotations

from collections import Counter

from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.scheduler.quotas import Quotas, Waiting
from tinyloop_service.scheduler.request import Request, RequestState

Job = Request | Prefix


class Line:
    """The queue and the lanes."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._queue: dict[int, tuple[Job, int]] = {}  # by order: who, and since when
        self._lanes: dict[str, dict[int, Request]] = {}  # by tenant, then order; none is empty
        self._lane_of: dict[int, str] = {}  # tenant, by order
        self._lane_tokens: Counter[str] = Counter()  # that those in a lane will take, by tenant
        self._num_requests: Counter[str] = Counter()  # in the queue, by tenant
        self._num_builds: Counter[str] = Counter()
        self.next_start_ns: int | None = None  # when time alone lets the next one in, as far as was seen

    @property
    def num_queued(self) -> int:
        """Those who wait for more than a quota."""
        return len(self._queue)

    def queued(self) -> list[tuple[int, Job, int]]:
        """Order, job and since when it has aged, oldest first."""
        return [(order, job, since_ns) for order, (job, since_ns) in self._queue.items()]

    def jobs(self) -> list[tuple[int, Job]]:
        """All, those in lanes too."""
        kept_back = [entry for lane in self._lanes.values() for entry in lane.items()]
        return [*((order, job) for order, (job, _) in self._queue.items()), *kept_back]

    def waiting(self, tenant: str) -> Waiting:
        return Waiting(
            requests=self._num_requests.get(tenant, 0),
            builds=self._num_builds.get(tenant, 0),
            kept_back=len(self._lanes.get(tenant, ())),
            tokens=self._lane_tokens.get(tenant, 0),
        )

    def add(self, order: int, job: Job, now_ns: int) -> None:
        """A request goes behind those of its tenant that wait for a quota; a build waits for none."""
        if isinstance(job, Prefix):
            job.wanted_order = order
        elif job.spec.tenant in self._lanes or not self._quotas.lets_in(job.spec.tenant, now_ns):
            self._keep_back(order, job)
            return
        self._enter(order, job, now_ns)

    def remove(self, order: int) -> None:
        """Unknown ones are ignored."""
        if order in self._lane_of:
            self._leave_lane(order)
        elif order in self._queue:
            job, _ = self._queue.pop(order)
            self._counter(job)[_tenant(job)] -= 1

    def forget_gone(self) -> None:
        """Drop those in the queue that have left by themselves."""
        for order, job, _ in self.queued():
            if not still_waits(job, order):
                self.remove(order)

    def let_in(self, now_ns: int) -> None:
        """Whom their quotas let in by now."""
        before, self.next_start_ns = len(self._queue), None
        for tenant in list(self._lanes):
            while tenant in self._lanes and self._quotas.lets_in(tenant, now_ns):
                order, request = next(iter(self._lanes[tenant].items()))
                self._leave_lane(order)
                if still_waits(request, order):
                    self._enter(order, request, now_ns)
            start_ns = self._quotas.lets_in_at_ns(tenant, now_ns) if tenant in self._lanes else None
            if start_ns is not None:
                self.next_start_ns = min(start_ns, self.next_start_ns or start_ns)
        if len(self._queue) > before:
            self._queue = dict(sorted(self._queue.items(), key=lambda entry: entry[0]))

    def check(self) -> None:
        """Lanes, counts and prefixes agree."""
        for tenant, lane in self._lanes.items():
            assert lane and list(lane) == sorted(lane), f"the lane of {tenant!r} is empty, or out of order"
            assert self._lane_tokens[tenant] == sum(request.tokens_asked for request in lane.values())
            for order, request in lane.items():
                assert self._lane_of[order] == tenant and not request.is_let_in
                assert request.prefix is None or order in request.prefix.kept_back
        assert len(self._lane_of) == sum(map(len, self._lanes.values()))
        assert list(self._queue) == sorted(self._queue), "the queue is out of order"
        for counter, kind in ((self._num_requests, Request), (self._num_builds, Prefix)):
            counted = Counter(_tenant(job) for job, _ in self._queue.values() if isinstance(job, kind))
            assert +counter == counted, f"miscounted: {counter}, there are {counted}"

    def _enter(self, order: int, job: Job, now_ns: int) -> None:
        if isinstance(job, Request):
            self._quotas.enter(job.spec.tenant, job.tokens_asked, now_ns)
            job.is_let_in = True
        self._queue[order] = (job, now_ns)
        self._counter(job)[_tenant(job)] += 1

    def _keep_back(self, order: int, request: Request) -> None:
        tenant = request.spec.tenant
        self._lanes.setdefault(tenant, {})[order] = request
        self._lane_of[order] = tenant
        self._lane_tokens[tenant] += request.tokens_asked
        if request.prefix is not None:
            request.prefix.kept_back.add(order)

    def _leave_lane(self, order: int) -> None:
        tenant = self._lane_of.pop(order)
        request = self._lanes[tenant].pop(order)
        self._lane_tokens[tenant] -= request.tokens_asked
        if request.prefix is not None:
            request.prefix.kept_back.discard(order)
        if not self._lanes[tenant]:
            del self._lanes[tenant]

    def _counter(self, job: Job) -> Counter[str]:
        return self._num_requests if isinstance(job, Request) else self._num_builds


def still_waits(job: Job, order: int) -> bool:
    """Whether it has neither started nor ended since it was added."""
    if isinstance(job, Request):
        return job.state is RequestState.QUEUED
    return job.wanted_order == order


def _tenant(job: Job) -> str:
    return job.spec.tenant if isinstance(job, Request) else job.tenant
