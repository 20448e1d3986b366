#!/usr/bin/env python3
"""Another program that uses our locks: takes a lock in Redis as Spring Integration or Redisson does, in a database as Spring Integration
does, or in ZooKeeper with kazoo, many times.

It judges nothing: it journals when it was inside, and the tests put the journals of all processes together. What is asked of
the server is in spring.py, redisson.py, jdbc.py and zoo.py. Started by the tests in tests/tests; by hand:

    peer.py --url redis://127.0.0.1/ --layout spring --namespace locks --key orders/42 \
        --sections 500 --journal journal --counter counter
    peer.py --url redis://127.0.0.1/ --layout redisson --key orders/42 --once hold 5000
    peer.py --url postgres://postgres@127.0.0.1/shop --layout spring --namespace DEFAULT --key orders/42 --once hold
    peer.py --url zk://127.0.0.1:2181 --layout renamed --key /locks/orders --once hold

Whatever goes wrong ends it, with a status other than zero and the reason on its standard error.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.retry import Retry

    # The first release that hears sharded channels is 5.0.
    redis.client.PubSub.ssubscribe
except (ImportError, AttributeError) as error:
    sys.exit(
        f"peer.py: {error}. It needs the package redis for python3 ({sys.executable}): "
        "python3 -m pip install -r tests/peers/requirements.txt"
    )

import jdbc
import redisson
import spring
import zoo

# The clock of the testkit's `host_clock`.
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now():
    return time.clock_gettime_ns(CLOCK)


def say(line):
    print(line, flush=True)


class Wait:
    """What happened while a lock was waited for."""

    def __init__(self):
        self.wakes = 0
        self.fallbacks = 0
        self.woken_at = None

    def woken(self):
        """A release was heard of."""
        self.woken_at = now()
        self.wakes += 1

    def gave_up(self):
        """None was heard of for as long as the original listens before it looks by itself."""
        self.fallbacks += 1


def connect(url):
    """A client that sends nothing twice, and whether it is one of a cluster."""
    # What is retried would be taken by whoever did not hear that it has the lock already.
    options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 60, "socket_connect_timeout": 60}
    client = redis.Redis.from_url(url, protocol=2, **options)
    if not client.info("cluster").get("cluster_enabled"):
        return client, False
    client.close()
    return RedisCluster.from_url(url, protocol=2, **options), True


def open_lock(options):
    if options.url.startswith("zk"):
        return zoo.KazooLock(options.url, options.key, options.layout, options.lease_ms or zoo.SESSION_MS)
    if not options.url.startswith("redis"):
        ttl_ms = options.lease_ms or jdbc.TTL_MS
        return jdbc.JdbcLock(options.url, options.generation, options.namespace, options.key, ttl_ms, options.idle_ms)
    client, cluster = connect(options.url)
    if options.layout == "redisson":
        name = f"{options.namespace}:{options.key}" if options.namespace else options.key
        lease_ms = options.lease_ms or redisson.LEASE_MS
        channel = redisson.prefix_name("redisson_lock__channel", name)
        listener = listening(client, cluster, channel)
        return redisson.RedissonLock(client, listener, name, lease_ms, options.verb)
    if cluster:
        sys.exit("peer.py: in a cluster only --layout redisson is known")
    lease_ms = options.lease_ms or spring.LEASE_MS
    if options.spin:
        return spring.SpinLock(client, options.namespace, options.key, lease_ms, options.idle_ms)
    old = options.channel == "old"
    return spring.PubSubLock(client, options.namespace, options.key, lease_ms, old)


def listening(client, cluster, channel):
    if not cluster:
        return client.pubsub()
    # A sharded channel is heard on the node that has its slot alone; any other on all.
    node = client.get_node_from_key(channel)
    return client.get_redis_connection(node).pubsub()


def take_sections(lock, options):
    journal = open(options.journal, "a", encoding="utf-8")
    counter = Path(options.counter)
    say("ready")
    if options.on_cue:
        await_cue()
    for _ in range(options.sections):
        wait = Wait()
        asked = now()
        lock.lock(wait)
        entered = now()
        # One step for all who exclude each other, and many for those who do not.
        count = int(counter.read_text(encoding="ascii"))
        time.sleep(options.hold_ms / 1000)
        write_over(counter, count + 1)
        token = getattr(lock, "token", None)
        leaving = now()
        lock.unlock()
        line = {
            "client": os.getpid(),
            "asked": asked,
            "entered": entered,
            "leaving": leaving,
            "left": now(),
            "token": token,
            "woken": wait.woken_at,
            "wakes": wait.wakes,
            "fallbacks": wait.fallbacks,
        }
        journal.write(json.dumps(line) + "\n")
        journal.flush()
        time.sleep(random.uniform(0, options.pause_ms) / 1000)
    journal.close()
    say("done")


def write_over(counter, count):
    """Puts a number into the file at once: whoever reads it at the wrong time reads a wrong number, not half of one."""
    with open(counter, "r+", encoding="ascii") as file:
        file.write(f"{count:>10}")


def await_cue():
    """Waits for a line of input; at the end of the input the test is gone, and so is this process."""
    cue = threading.Event()

    def read():
        for _ in sys.stdin:
            cue.set()
        print("peer.py: the input has ended", file=sys.stderr, flush=True)
        os._exit(3)

    threading.Thread(target=read, daemon=True).start()
    cue.wait()


def once(lock, what, hold_ms=None):
    if what == "try":
        if not lock.try_lock():
            say("busy")
            return
        say("held")
    else:
        say("waiting")
        lock.lock(Wait())
        say("held")
        if hold_ms is None:
            sys.stdin.readline()
        else:
            time.sleep(float(hold_ms) / 1000)
    lock.unlock()
    say("released")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="redis://HOST:PORT/, of one server or of any node of a cluster; postgres://… or mysql://…; zk://…")
    parser.add_argument("--layout", required=True, choices=["spring", "redisson", "stock", "patterned", "renamed"], help="the last three are forms of kazoo's")
    parser.add_argument("--channel", choices=["old", "new"], default="new", help="spring: before or since 6.4.8 and 6.5.3")
    parser.add_argument("--generation", choices=["v6", "v7"], default="v7", help="spring in a database: version 6 or 7")
    parser.add_argument("--verb", choices=["PUBLISH", "SPUBLISH"], default="PUBLISH", help="redisson: how it tells of a release")
    parser.add_argument("--spin", action="store_true", help="spring: a registry of the type SPIN_LOCK")
    parser.add_argument("--idle-ms", type=float, default=spring.IDLE_MS, help="spring: between the tries of --spin, or of a database")
    parser.add_argument("--lease-ms", type=int, help="the original's default unless set: spring 60000 (a database: 10000), redisson 30000")
    parser.add_argument("--namespace", default="", help="spring: the registryKey, or a database's region; redisson: what names begin with, if anything")
    parser.add_argument("--key", required=True)
    parser.add_argument("--once", nargs="+", metavar="DO", help="try; hold MS; or hold, until a line of input or its end")
    parser.add_argument("--sections", type=int, help="how many times to take the lock")
    parser.add_argument("--journal", help="the file that gets a line for each section")
    parser.add_argument("--counter", help="the file with a number that each section increments")
    parser.add_argument("--hold-ms", type=float, default=1, help="how long a section takes")
    parser.add_argument("--pause-ms", type=float, default=4, help="at most between two sections")
    parser.add_argument("--on-cue", action="store_true", help="begin at a line of input, and die at its end")
    options = parser.parse_args()
    if options.once is None and not (options.sections and options.journal and options.counter):
        parser.error("give --once, or --sections with --journal and --counter")
    if options.once and not (options.once == ["try"] or options.once[0] == "hold" and len(options.once) <= 2):
        parser.error("--once is followed by try, hold or hold MS")
    if options.layout == "spring" and not options.namespace:
        parser.error("give --namespace, which is Spring's registryKey or region")
    if options.layout == "spring" and options.verb == "SPUBLISH":
        parser.error("Spring knows no SPUBLISH")
    if (options.layout in ["stock", "patterned", "renamed"]) != options.url.startswith("zk"):
        parser.error("the forms of kazoo's are for ZooKeeper, which knows no others")
    if options.layout == "redisson" and not options.url.startswith("redis"):
        parser.error("in a database only --layout spring is known")
    if options.spin and options.layout != "spring":
        parser.error("--spin is for spring")
    return options


def main():
    options = parse()
    lock = open_lock(options)
    if options.once:
        once(lock, *options.once)
    else:
        take_sections(lock, options)


if __name__ == "__main__":
    main()
