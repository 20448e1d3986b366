"""Locks in ZooKeeper as kazoo acquires them, and by kazoo itself. Sections and journals are in peer.py.

kazoo has its own node names. A program that shares locks with Curator and with us either waits for their nodes too, as `patterned`
does with a parameter of kazoo, or uses their node names, as `renamed` does with its own class.
"""

import logging
import sys
import uuid

try:
    from kazoo.client import KazooClient
    from kazoo.exceptions import NoNodeError
    from kazoo.recipe.lock import Lock
except ImportError as error:
    sys.exit(
        f"peer.py: {error}. It needs the package kazoo for python3 ({sys.executable}): "
        "python3 -m pip install -r tests/peers/requirements.txt"
    )

# The tests cause lost connections, and kazoo raises them as errors.
logging.getLogger("kazoo").setLevel(logging.CRITICAL)

SESSION_MS = 10_000


class CuratorNamedLock(Lock):
    """kazoo's lock with Curator's names."""

    _NODE_NAME = "-lock-"
    _EXCLUDE_NAMES = ["-lock-", "__lock__"]

    def __init__(self, client, path, identifier=None):
        super().__init__(client, path, identifier)
        self.prefix = f"_c_{uuid.uuid4()}{self._NODE_NAME}"
        self.create_path = f"{self.path}/{self.prefix}"


class KazooLock:
    """A lock at a path. `naming` is stock, patterned or renamed."""

    def __init__(self, url, path, naming, session_ms):
        self.client = KazooClient(hosts=url.removeprefix("zk://"), timeout=session_ms / 1000)
        self.client.start(timeout=60)
        self.path = path
        self.naming = naming
        self.held = None

    def new_lock(self):
        if self.naming == "renamed":
            return CuratorNamedLock(self.client, self.path, "peer")
        patterns = ["-lock-"] if self.naming == "patterned" else []
        return Lock(self.client, self.path, "peer", extra_lock_patterns=patterns)

    def acquire(self, **options):
        while True:
            lock = self.new_lock()
            try:
                if not lock.acquire(**options):
                    return False
            except NoNodeError:
                # kazoo creates persistent parents. A container that Curator or we have created is removed when it is empty, even
                # between kazoo's check and the creation of its node.
                continue
            self.held = lock
            return True

    def try_lock(self):
        return self.acquire(blocking=False)

    def lock(self, wait):
        if not self.acquire():
            raise RuntimeError("kazoo gave up")

    @property
    def token(self):
        """The transaction that created the node of this lock."""
        return self.client.exists(f"{self.path}/{self.held.node}").czxid

    def unlock(self):
        self.held.release()
        self.held = None
