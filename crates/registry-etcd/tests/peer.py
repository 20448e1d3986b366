#!/usr/bin/env python3
"""Another program that uses our locks: takes a lock through the JSON gateway of etcd, by the servers' own locks (v3lock), many times.

It judges nothing: it works inside the lock and writes down the revision that its key was created in. Started by peers.rs:

    peer.py 127.0.0.1:2379 NAME SECTIONS FOLDER

Whatever goes wrong ends it, with a status other than zero and the reason on its standard error.
"""

import base64
import http.client
import json
import os
import sys

address, name, sections, folder = sys.argv[1:]
connection = http.client.HTTPConnection(address, timeout=60)


def ask(path, request):
    connection.request("POST", path, json.dumps(request))
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        sys.exit(f"{path}: {answer.status} {text}")
    return json.loads(text)


def section(revision):
    """What nobody else may do at the same time: the folder says so, the counter counts, the journal tells in which order."""
    os.mkdir(f"{folder}/inside")
    with open(f"{folder}/counter") as file:
        count = int(file.read())
    with open(f"{folder}/journal", "a") as file:
        file.write(f"gateway {revision}\n")
    with open(f"{folder}/counter", "w") as file:
        file.write(str(count + 1))
    os.rmdir(f"{folder}/inside")


lease = ask("/v3/lease/grant", {"TTL": 60})["ID"]
encoded = base64.b64encode(name.encode()).decode()
for _ in range(int(sections)):
    key = ask("/v3/lock/lock", {"name": encoded, "lease": lease})["key"]
    section(ask("/v3/kv/range", {"key": key})["kvs"][0]["create_revision"])
    ask("/v3/lock/unlock", {"key": key})
ask("/v3/lease/revoke", {"ID": lease})
