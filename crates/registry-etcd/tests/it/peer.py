#!/usr/bin/env python3
"""A peer of this store: acquires a lock repeatedly through the JSON gateway of etcd, by etcd's lock service (v3lock).

In each critical section it records the revision in which its key was created. It verifies nothing. Started by peers.rs:

    peer.py 127.0.0.1:2379 NAME SECTIONS FOLDER

Any error ends the program with a nonzero status and a message on standard error.
"""

import base64
import http.client
import json
import os
import sys

address, name, sections, folder = sys.argv[1:]
connection = http.client.HTTPConnection(address, timeout=60)


def call(path, request):
    connection.request("POST", path, json.dumps(request))
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        sys.exit(f"{path}: {response.status} {text}")
    return json.loads(text)


def section(revision):
    """The critical section: the folder detects concurrent entry, the counter detects lost updates, the journal records the order."""
    os.mkdir(f"{folder}/inside")
    with open(f"{folder}/counter") as file:
        count = int(file.read())
    with open(f"{folder}/journal", "a") as file:
        file.write(f"gateway {revision}\n")
    with open(f"{folder}/counter", "w") as file:
        file.write(str(count + 1))
    os.rmdir(f"{folder}/inside")


lease = call("/v3/lease/grant", {"TTL": 60})["ID"]
encoded = base64.b64encode(name.encode()).decode()
for _ in range(int(sections)):
    key = call("/v3/lock/lock", {"name": encoded, "lease": lease})["key"]
    section(call("/v3/kv/range", {"key": key})["kvs"][0]["create_revision"])
    call("/v3/lock/unlock", {"key": key})
call("/v3/lease/revoke", {"ID": lease})
