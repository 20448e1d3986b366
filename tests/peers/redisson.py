"""Locks as Redisson's RLock acquires them. Sections and journals are in peer.py.

The scripts are Redisson's own, from redisson/src/main/java/org/redisson/RedissonLock.java (tryLockInnerAsync and
unlockInnerAsync) of https://github.com/redisson/redisson, version 4.7. Copyright (c) 2013-2026 Nikita Koksharov. Licensed
under the Apache License, Version 2.0; see LICENSE-APACHE at the root of this repository. They are unchanged,
because our locks must be compatible with them.

The lock has a lease that is not renewed, as after `lock(leaseTime, unit)`. No call waits for replicas.
"""

import secrets
import threading
import uuid

TRY_LOCK_SCRIPT = (
    "if ((redis.call('exists', KEYS[1]) == 0) "
    "or (redis.call('hexists', KEYS[1], ARGV[2]) == 1)) then "
    "redis.call('hincrby', KEYS[1], ARGV[2], 1); "
    "redis.call('pexpire', KEYS[1], ARGV[1]); "
    "return nil; "
    "end; "
    "return redis.call('pttl', KEYS[1]);"
)

UNLOCK_SCRIPT = (
    "local val = redis.call('get', KEYS[3]); "
    "if val ~= false then "
    "return tonumber(val);"
    "end; "
    "if (redis.call('hexists', KEYS[1], ARGV[3]) == 0) then "
    "return nil;"
    "end; "
    "local counter = redis.call('hincrby', KEYS[1], ARGV[3], -1); "
    "if (counter > 0) then "
    "redis.call('pexpire', KEYS[1], ARGV[2]); "
    "redis.call('set', KEYS[3], 0, 'px', ARGV[5]); "
    "return 0; "
    "else "
    "redis.call('del', KEYS[1]); "
    "redis.call(ARGV[4], KEYS[2], ARGV[1]); "
    "redis.call('set', KEYS[3], 1, 'px', ARGV[5]); "
    "return 1; "
    "end; "
)

UNLOCK_MESSAGE = 0

# `lockWatchdogTimeout`, unless it is set.
LEASE_MS = 30_000

# The expiry of the latch of a release. In Redisson, it is (timeout + delay(retryAttempts)) *
# retryAttempts. This is the maximum with the default options.
LATCH_MS = 20_000

FOREVER_S = 24 * 60 * 60


def prefix_name(prefix, name):
    """Same as RedissonObject.prefixName: a name with a brace is assumed to have a hash tag."""
    return f"{prefix}:{name}" if "{" in name else f"{prefix}:{{{name}}}"


class RedissonLock:
    """RedissonLock. `verb` is the command that the client's connection manager chose: SPUBLISH in a cluster, or PUBLISH."""

    def __init__(self, client, listener, name, lease_ms, verb):
        self.client = client
        self.name = name
        self.channel = prefix_name("redisson_lock__channel", name)
        self.lock_name = f"{uuid.uuid4()}:{threading.get_native_id()}"
        self.lease_ms = lease_ms
        self.verb = verb
        self.listener = listener
        self.try_lock_script = client.register_script(TRY_LOCK_SCRIPT)
        self.unlock_script = client.register_script(UNLOCK_SCRIPT)

    def try_acquire(self):
        """Returns None if the lock is acquired, otherwise the remaining lease of the holder."""
        return self.try_lock_script(keys=[self.name], args=[self.lease_ms, self.lock_name])

    def try_lock(self):
        return self.try_acquire() is None

    def lock(self, wait):
        if self.try_acquire() is None:
            return
        self.subscribe()
        try:
            while True:
                left_ms = self.try_acquire()
                if left_ms is None:
                    return
                self.await_message(wait, left_ms)
        finally:
            self.unsubscribe()

    def subscribe(self):
        # Waits for the confirmation of the last unsubscription: earlier messages belong to the last
        # wait.
        while self.listener.subscribed:
            self.listener.get_message(timeout=1)
        if self.verb == "SPUBLISH":
            self.listener.ssubscribe(self.channel)
        else:
            self.listener.subscribe(self.channel)
        confirmed = self.listener.get_message(timeout=60)
        if confirmed is None or confirmed["type"] not in ("subscribe", "ssubscribe"):
            raise RuntimeError(f"the subscription was answered with {confirmed}")

    def unsubscribe(self):
        if self.verb == "SPUBLISH":
            self.listener.sunsubscribe(self.channel)
        else:
            self.listener.unsubscribe(self.channel)

    def await_message(self, wait, left_ms):
        # In Redisson, each message adds a permit to the semaphore of the waiting callers, even if
        # no caller waits. Messages that arrived earlier therefore count too. The wait for a lock
        # without a lease has no limit.
        message = self.listener.get_message(timeout=FOREVER_S if left_ms < 0 else left_ms / 1000)
        if message is None:
            wait.timed_out()
            return
        # Redisson parses every message as a number, and fails if it is not one.
        if message["type"] in ("message", "smessage") and int(message["data"]) == UNLOCK_MESSAGE:
            wait.woken()

    def unlock(self):
        latch = prefix_name("redisson_unlock_latch", self.name) + ":" + secrets.token_hex(16)
        answer = self.unlock_script(
            keys=[self.name, self.channel, latch],
            args=[UNLOCK_MESSAGE, self.lease_ms, self.lock_name, self.verb, LATCH_MS],
        )
        self.client.delete(latch)
        if answer is None:
            raise RuntimeError("attempt to unlock lock, not locked by current thread")
