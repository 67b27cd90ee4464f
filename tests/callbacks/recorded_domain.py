"""An NVTX domain for tests."""

import threading
from itertools import count


class RecordedDomain:
    """Stands for a domain that a tool watches, and checks what the tool would see."""

    def __init__(self):
        self.events = []
        self.tree = []
        self.attributes = []
        self.threads = set()
        self.payloads = {}
        self._stack = []
        self._started = {}
        self._ids = count(1)

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        self.attributes.append((message, color))
        return message, payload

    def push_range(self, attributes):
        self.threads.add(threading.get_ident())
        self.events.append(("push", attributes[0]))
        self._stack.append([attributes[0]])
        (self._stack[-2] if len(self._stack) > 1 else self.tree).append(self._stack[-1])

    def pop_range(self):
        self.events.append(("pop", self._stack.pop()[0]))

    def start_range(self, attributes):
        message, payload = attributes
        self.payloads.setdefault(message, []).append(payload)
        self.events.append(("start", message))
        range_id = next(self._ids)
        self._started[range_id] = message
        return range_id

    def end_range(self, range_id):
        self.events.append(("end", self._started.pop(range_id)))

    @property
    def is_balanced(self):
        return not self._stack and not self._started
