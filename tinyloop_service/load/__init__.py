"""Load tests: one harness for any endpoint and for the in-process engine.

results    what a test found, as one frozen value          document   the same as JSON, and back
"""

from tinyloop_service.load.results import Result

__all__ = ["Result"]
