"""Locks in ZooKeeper, acquired with the library kazoo. Sections and journals are in peer.py.

kazoo has its own node names. There are two ways for kazoo to share locks with Curator and with us. With `patterned`, it waits for
their nodes too, by a parameter of kazoo. With `renamed`, it uses their node names, by a subclass of its lock. `stock` is unchanged.
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

# The tests break connections on purpose. kazoo raises an error for each, so its log is not needed.
logging.getLogger("kazoo").setLevel(logging.CRITICAL)

SESSION_MS = 10_000


class CuratorNamedLock(Lock):
    """kazoo's lock with Curator's node names."""

    _NODE_NAME = "-lock-"
    _EXCLUDE_NAMES = ["-lock-", "__lock__"]

    def __init__(self, client, path, identifier=None):
        super().__init__(client, path, identifier)
        self.prefix = f"_c_{uuid.uuid4()}{self._NODE_NAME}"
        self.create_path = f"{self.path}/{self.prefix}"


class KazooLock:
    """A lock at a path. `naming` is stock, patterned or renamed, as described above."""

    def __init__(self, url, path, naming, session_ms):
        self.client = KazooClient(hosts=url.removeprefix("zk://"), timeout=session_ms / 1000)
        self.client.start(timeout=60)
        self.path = path
        self.naming = naming
        self.held_lock = None

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
                # ZooKeeper removes an empty container that Curator or we have created. This can
                # happen after kazoo has checked that the parent exists, and before it creates its
                # node.
                continue
            self.held_lock = lock
            return True

    def try_lock(self):
        return self.acquire(blocking=False)

    def lock(self, wait):
        if not self.acquire():
            raise RuntimeError("kazoo gave up")

    @property
    def token(self):
        """The id of the transaction that created the node of this lock."""
        return self.client.exists(f"{self.path}/{self.held_lock.node}").czxid

    def unlock(self):
        self.held_lock.release()
        self.held_lock = None
