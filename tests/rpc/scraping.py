"""Reads a metrics port as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Values by name of the series and labels."""

    text: str
    values: dict[tuple[str, Labels], float]

    def __call__(self, name: str, **labels: str) -> float:
        """The value of tinyloop_{name}; KeyError where there is no such series."""
        return self.values[f"tinyloop_{name}", frozenset(labels.items())]

    def series(self, name: str) -> dict[Labels, float]:
        return {labels: value for (sample, labels), value in self.values.items() if sample == f"tinyloop_{name}"}

    def by(self, name: str, *names: str) -> dict[str | tuple[str, ...], float]:
        """Values by one label, or by several; zeros left out."""
        found: dict[str | tuple[str, ...], float] = {}
        for labels, value in self.series(name).items():
            key = tuple(dict(labels)[label] for label in names)
            if value:
                found[key[0] if len(key) == 1 else key] = value
        return found


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text: str = response.read().decode()
    return text


async def scrape(address: str) -> Scrape:
    text = await asyncio.to_thread(read, address)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(values) == len(samples), "a series is there twice"
    return Scrape(text, values)
