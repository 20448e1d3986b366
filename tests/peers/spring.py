"""Locks as Spring Integration's RedisLockRegistry acquires them. Sections and journals are in peer.py.

The scripts are Spring Integration's own, from
spring-integration-redis/src/main/java/org/springframework/integration/redis/util/RedisLockRegistry.java
of https://github.com/spring-projects/spring-integration, versions 6.5.2 and 7.1 (which differ only in the channel).
Copyright 2014-present the original author or authors. Licensed under the Apache License, Version 2.0; see
LICENSE-APACHE at the root of this repository. They are unchanged, because our locks must be compatible with them.
"""

import time
import uuid

import redis

OBTAIN_LOCK_SCRIPT = """\
local lockClientId = redis.call('GET', KEYS[1])
if lockClientId == ARGV[1] then
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
	return true
elseif not lockClientId then
	redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
	return true
end
return false
"""

PUB_SUB_UNLOCK_SCRIPT = """\
local lockClientId = redis.call('GET', KEYS[1])
if (lockClientId == ARGV[1] and redis.call('UNLINK', KEYS[1]) == 1) then
	redis.call('PUBLISH', ARGV[2], KEYS[1])
	return true
end
return false
"""

SPIN_UNLOCK_SCRIPT = """\
local lockClientId = redis.call('GET', KEYS[1])
if lockClientId == ARGV[1] then
	redis.call('UNLINK', KEYS[1])
	return true
end
return false
"""

# `expireAfter` and `idleBetweenTries`, unless they are set.
LEASE_MS = 60_000
IDLE_MS = 100


class SpringLock:
    """RedisLock, with the fields of its registry."""

    def __init__(self, client, namespace, key, lease_ms):
        self.client = client
        self.client_id = str(uuid.uuid4())
        self.lock_key = f"{namespace}:{key}"
        self.unlock_channel = f"{namespace}-channel"
        self.lease_ms = lease_ms
        self.obtain_script = client.register_script(OBTAIN_LOCK_SCRIPT)

    def try_lock(self):
        # Redis converts a script's true to the number 1, and its false to nil.
        answer = self.obtain_script(keys=[self.lock_key], args=[self.client_id, self.lease_ms])
        return answer == 1

    def unlock(self):
        if not self.remove_lock_key():
            raise RuntimeError("Lock was released in the store due to expiration.")


class SpinLock(SpringLock):
    """RedisSpinLock: polls, and publishes no release."""

    def __init__(self, client, namespace, key, lease_ms, idle_ms):
        super().__init__(client, namespace, key, lease_ms)
        self.idle_ms = idle_ms
        self.supports_compare_and_delete = True
        self.unlock_script = client.register_script(SPIN_UNLOCK_SCRIPT)

    def lock(self, wait):
        while not self.try_lock():
            time.sleep(self.idle_ms / 1000)

    def remove_lock_key(self):
        if self.supports_compare_and_delete:
            try:
                return self.client.execute_command("DELEX", self.lock_key, "IFEQ", self.client_id) == 1
            except redis.ResponseError as error:
                # Servers before 8.4 do not know DELEX. The client removes the "ERR" of the message.
                if not str(error).lower().startswith(("unknown command", "syntax error")):
                    raise
                self.supports_compare_and_delete = False
        return self.unlock_script(keys=[self.lock_key], args=[self.client_id]) == 1


class PubSubLock(SpringLock):
    """RedisPubSubLock. `old` is the channel of all versions before 6.4.8 and 6.5.3, one for all locks of a registry."""

    def __init__(self, client, namespace, key, lease_ms, old):
        super().__init__(client, namespace, key, lease_ms)
        self.old = old
        self.unlock_script = client.register_script(PUB_SUB_UNLOCK_SCRIPT)
        self.listener = None

    def lock(self, wait):
        if self.try_lock():
            return
        if self.listener is None:
            self.listen()
        while True:
            # Spring's listener drops messages that arrive while no caller has registered for the
            # key.
            while self.listener.get_message(timeout=0) is not None:
                pass
            if self.try_lock():
                return
            self.await_message(wait)
            if self.try_lock():
                return

    def listen(self):
        self.listener = self.client.pubsub()
        if self.old:
            self.listener.subscribe(self.unlock_channel)
        else:
            self.listener.psubscribe(f"{self.unlock_channel}:*")
        confirmed = self.listener.get_message(timeout=60)
        if confirmed is None or confirmed["type"] not in ("subscribe", "psubscribe"):
            raise RuntimeError(f"the subscription was answered with {confirmed}")

    def await_message(self, wait):
        # As in the original, the wait ends after the waiter's own lease, even if the holder's lease
        # ends later.
        deadline = time.monotonic() + self.lease_ms / 1000
        while (left := deadline - time.monotonic()) > 0:
            message = self.listener.get_message(timeout=left)
            if message is None:
                continue
            if message["type"] in ("message", "pmessage") and message["data"] == self.lock_key.encode():
                wait.woken()
                return
        wait.timed_out()

    def remove_lock_key(self):
        channel = self.unlock_channel if self.old else f"{self.unlock_channel}:{self.lock_key}"
        return self.unlock_script(keys=[self.lock_key], args=[self.client_id, channel]) == 1
