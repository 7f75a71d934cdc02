"""Whose time is it on a host, without a GPU?"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.collectives import collectives_of
from analysis.attribution.components import COMMUNICATION, views_and_metadata
from analysis.attribution.intervals import innermost, merged, slices_of
from analysis.attribution.ledger.host_activity import host_code
from analysis.attribution.ledger.kinds import (
    COMMUNICATES,
    COMPUTES,
    IDLES,
    NUMBER,
    RESTS,
    WAITS,
    WORKS,
)
from analysis.trace.links import OPERATOR
from analysis.trace.tables import take_or
from analysis.trace.timeline import Timeline


class HostOwners(NamedTuple):
    """Whose time it is on the host."""

    edges: np.ndarray  # us, [times + 1]: between two of them, nothing changes
    owner: np.ndarray  # [times]: row of host; -1: none
    helped: np.ndarray  # [times]: whether another thread than that of the steps owns it
    collective: np.ndarray  # [times]: the one in progress, row of Collectives; -1: none
    communicates: np.ndarray  # [times]: whether the time is that collective's


def host_owners(timeline: Timeline, further_edges: np.ndarray) -> HostOwners:
    """further_edges: beside those of events and collectives."""
    host, collectives = timeline.host, collectives_of(timeline)
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    ours = (host["thread"] == timeline.thread).to_numpy()
    main = innermost(host, ours)
    backward = innermost(host, ~ours, (host["node"] >= 0).to_numpy())
    pending = slices_of(collectives.events)
    edges = np.unique(np.concatenate([further_edges, main.edges, backward.edges, pending.edges]))
    times = edges[:-1]
    event, in_backward, collective = main.at(times), backward.at(times), pending.at(times)
    is_ours = take_or(is_operator, event, False) | (in_backward < 0)
    owner = np.where(is_ours, event, in_backward)
    communicates = (collective >= 0) & ~take_or(collectives.computes, owner, False)
    of_range = communicates & ~take_or(is_operator, owner, False)
    owner = np.where(of_range, take_or(collectives.events["row"], collective, -1), owner)
    return HostOwners(edges, owner, owner != event, collective, communicates)


def host_slices(timeline: Timeline) -> pd.DataFrame:
    host, steps, code = timeline.host, slices_of(timeline.steps), host_code(timeline)
    owners = host_owners(timeline, np.concatenate([steps.edges, code.edges]))
    times = owners.edges[:-1]
    is_beneath = (owners.collective >= 0) & ~owners.communicates
    columns = {
        "owner": owners.owner,
        "step": steps.at(times),
        "code": code.at(times) >= 0,
        "helped": owners.helped,
        "collective": np.where(owners.communicates, owners.collective, -1),
        "overlaps": np.where(is_beneath, 1 << COMMUNICATES, 0),
    }
    slices = merged(owners.edges, columns)
    slices = slices[(slices["step"] >= 0).to_numpy()].reset_index(drop=True)
    owner, helped = slices["owner"].to_numpy(), slices.pop("helped").to_numpy()
    communicates = (slices["collective"] >= 0).to_numpy()
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    operator = np.where(take_or(is_operator, owner, False), owner, -1)
    fetches = take_or((host["phase"] == "data").to_numpy(), owner, False) & ~communicates
    starts_one = take_or((host["category"] == COMMUNICATION).to_numpy(), owner, False)
    rests = (views_and_metadata(timeline, operator) | starts_one) & ~communicates
    of_nothing = np.where(slices.pop("code"), NUMBER["host_code"], NUMBER["launch"])
    causes = [NUMBER["communication"], NUMBER["data"], of_nothing, NUMBER["thread"]]
    rules = [communicates, fetches, rests, helped]  # the first that applies counts
    return slices.assign(
        event=owner,
        operator=operator,
        of_steps=True,
        kind=np.select([communicates, rests], [COMMUNICATES, IDLES], COMPUTES),
        state=np.select(rules, [WAITS, WAITS, RESTS, WAITS], WORKS),
        cause=np.select(rules, causes),
    )
