"""The scheduler: a pure core (prefixes, requests, pages, plans) and the asyncio shell that runs it on an engine."""
