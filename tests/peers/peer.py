#!/usr/bin/env python3
"""A peer program of the tests: acquires a lock many times, as another lock library does.

The lock is in Redis, as with Spring Integration or Redisson; in a database, as with Spring Integration; or in ZooKeeper, with kazoo.

It checks nothing. It writes the times of its critical sections to a journal, and the tests merge the journals of all processes.
The requests to the server are in spring.py, redisson.py, jdbc.py and zoo.py. The tests in tests/tests start it. To run it manually:

    peer.py --url redis://127.0.0.1/ --layout spring --namespace locks --key orders/42 \
        --sections 500 --journal journal --counter counter
    peer.py --url redis://127.0.0.1/ --layout redisson --key orders/42 --once hold 5000
    peer.py --url postgres://postgres@127.0.0.1/shop --layout spring --namespace DEFAULT --key orders/42 --once hold
    peer.py --url zk://127.0.0.1:2181 --layout renamed --key /locks/orders --once hold

Each error ends the program with a status other than zero and the reason on its standard error.
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

    # The first release that can subscribe to sharded channels is 5.0.
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

# The same clock as in the testkit's `host_clock`.
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now():
    return time.clock_gettime_ns(CLOCK)


def print_line(line):
    print(line, flush=True)


class Wait:
    """Counts the release messages and timeouts during one wait."""

    def __init__(self):
        self.wakes = 0
        self.fallbacks = 0
        self.woken_at = None

    def woken(self):
        """Records that a release message was received."""
        self.woken_at = now()
        self.wakes += 1

    def timed_out(self):
        """Records that no release message arrived before the timeout after which the original polls."""
        self.fallbacks += 1


def connect(url):
    """Returns a client that repeats no request, and whether it is a client of a cluster."""
    # A repeated request could acquire the lock for a caller that received no reply to its first
    # request.
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
        listener = new_listener(client, cluster, channel)
        return redisson.RedissonLock(client, listener, name, lease_ms, options.verb)
    if cluster:
        sys.exit("peer.py: a cluster supports only --layout redisson")
    lease_ms = options.lease_ms or spring.LEASE_MS
    if options.spin:
        return spring.SpinLock(client, options.namespace, options.key, lease_ms, options.idle_ms)
    old = options.channel == "old"
    return spring.PubSubLock(client, options.namespace, options.key, lease_ms, old)


def new_listener(client, cluster, channel):
    if not cluster:
        return client.pubsub()
    # Messages of a sharded channel reach only the node of its slot. Messages of other channels
    # reach all nodes.
    node = client.get_node_from_key(channel)
    return client.get_redis_connection(node).pubsub()


def run_sections(lock, options):
    journal = open(options.journal, "a", encoding="utf-8")
    counter = Path(options.counter)
    print_line("ready")
    if options.on_cue:
        wait_for_start()
    for _ in range(options.sections):
        wait = Wait()
        asked = now()
        lock.lock(wait)
        entered = now()
        # Read, pause and write are one atomic step only under mutual exclusion.
        count = int(counter.read_text(encoding="ascii"))
        time.sleep(options.hold_ms / 1000)
        overwrite_number(counter, count + 1)
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
    print_line("done")


def overwrite_number(counter, count):
    """Replaces the number in one write: a concurrent reader can read an old number, but never a part of a number."""
    with open(counter, "r+", encoding="ascii") as file:
        file.write(f"{count:>10}")


def wait_for_start():
    """Waits for a line of input. The end of the input means that the test has ended, so the process exits."""
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
            print_line("busy")
            return
        print_line("held")
    else:
        print_line("waiting")
        lock.lock(Wait())
        print_line("held")
        if hold_ms is None:
            sys.stdin.readline()
        else:
            time.sleep(float(hold_ms) / 1000)
    lock.unlock()
    print_line("released")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="redis://HOST:PORT/, of one server or of any node of a cluster; postgres://… or mysql://…; zk://…")
    parser.add_argument("--layout", required=True, choices=["spring", "redisson", "stock", "patterned", "renamed"], help="the last three are variants of kazoo's lock")
    parser.add_argument("--channel", choices=["old", "new"], default="new", help="spring: before or since 6.4.8 and 6.5.3")
    parser.add_argument("--generation", choices=["v6", "v7"], default="v7", help="spring in a database: version 6 or 7")
    parser.add_argument("--verb", choices=["PUBLISH", "SPUBLISH"], default="PUBLISH", help="redisson: the command that publishes a release")
    parser.add_argument("--spin", action="store_true", help="spring: a registry of the type SPIN_LOCK")
    parser.add_argument("--idle-ms", type=float, default=spring.IDLE_MS, help="spring: the pause between attempts with --spin or in a database")
    parser.add_argument("--lease-ms", type=int, help="the original's default unless set: spring 60000 (a database: 10000), redisson 30000")
    parser.add_argument("--namespace", default="", help="spring: the registryKey, or a database's region; redisson: the optional prefix of names")
    parser.add_argument("--key", required=True)
    parser.add_argument("--once", nargs="+", metavar="DO", help="try; hold MS; or hold, until a line of input or its end")
    parser.add_argument("--sections", type=int, help="how many times to acquire the lock")
    parser.add_argument("--journal", help="the file that gets a line for each section")
    parser.add_argument("--counter", help="the file with a number that each section increments")
    parser.add_argument("--hold-ms", type=float, default=1, help="the duration of a section")
    parser.add_argument("--pause-ms", type=float, default=4, help="the longest pause between two sections")
    parser.add_argument("--on-cue", action="store_true", help="start at a line of input, and exit at the end of the input")
    options = parser.parse_args()
    if options.once is None and not (options.sections and options.journal and options.counter):
        parser.error("give --once, or --sections with --journal and --counter")
    if options.once and not (options.once == ["try"] or options.once[0] == "hold" and len(options.once) <= 2):
        parser.error("--once is followed by try, hold or hold MS")
    if options.layout == "spring" and not options.namespace:
        parser.error("give --namespace, which is Spring's registryKey or region")
    if options.layout == "spring" and options.verb == "SPUBLISH":
        parser.error("Spring does not use SPUBLISH")
    if (options.layout in ["stock", "patterned", "renamed"]) != options.url.startswith("zk"):
        parser.error("ZooKeeper needs --layout stock, patterned or renamed, and only ZooKeeper has them")
    if options.layout == "redisson" and not options.url.startswith("redis"):
        parser.error("a database supports only --layout spring")
    if options.spin and options.layout != "spring":
        parser.error("--spin is for spring")
    return options


def main():
    options = parse()
    lock = open_lock(options)
    if options.once:
        once(lock, *options.once)
    else:
        run_sections(lock, options)


if __name__ == "__main__":
    main()
