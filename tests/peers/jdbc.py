"""Locks as Spring Integration's JdbcLockRegistry acquires them. Sections and journals are in peer.py.

The statements are those of DefaultLockRepository, of version 7.0 (`v7`) and of 6.x (`v6`). They have the same tables, columns,
conditions and transactions, and use the client's own clock, in UTC without a zone. Their `?` is a `%s` here.
"""

import hashlib
import re
import time
import uuid
from datetime import datetime, timedelta, timezone
from urllib.parse import unquote, urlsplit

# `timeToLive` and `idleBetweenTries`, unless they are set.
TTL_MS = 10_000
IDLE_MS = 100

DELETE = "DELETE FROM {prefix}LOCK WHERE REGION=%s AND LOCK_KEY=%s AND CLIENT_ID=%s"
UPDATE = {
    "v7": "UPDATE {prefix}LOCK SET CLIENT_ID=%s, EXPIRED_AFTER=%s "
    "WHERE REGION=%s AND LOCK_KEY=%s AND (CLIENT_ID=%s OR EXPIRED_AFTER<%s)",
    "v6": "UPDATE {prefix}LOCK SET CLIENT_ID=%s, CREATED_DATE=%s "
    "WHERE REGION=%s AND LOCK_KEY=%s AND (CLIENT_ID=%s OR CREATED_DATE<%s)",
}
INSERT = {
    "v7": "INSERT INTO {prefix}LOCK (REGION, LOCK_KEY, CLIENT_ID, CREATED_DATE, EXPIRED_AFTER) VALUES (%s, %s, %s, %s, %s)",
    "v6": "INSERT INTO {prefix}LOCK (REGION, LOCK_KEY, CLIENT_ID, CREATED_DATE) VALUES (%s, %s, %s, %s)",
}

UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")


def lock_key(key):
    """Returns UUIDConverter.getUUID(key).toString(). Java's nameUUIDFromBytes is an MD5 hash with the bits of UUID version 3."""
    if UUID.fullmatch(key):
        return key.lower()
    return str(uuid.UUID(bytes=hashlib.md5(key.encode()).digest(), version=3))


def now():
    return datetime.now(timezone.utc).replace(tzinfo=None)


class Postgres:
    def __init__(self, url):
        import psycopg2

        self.errors = psycopg2.errors
        self.connection = psycopg2.connect(url)
        self.integrity_error = psycopg2.IntegrityError
        self.database_error = psycopg2.Error

    def is_transient(self, error):
        errors = self.errors
        kinds = (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable, errors.QueryCanceled)
        return isinstance(error, kinds)


class MariaDb:
    def __init__(self, url):
        import pymysql

        address = urlsplit(url)
        self.connection = pymysql.connect(
            host=address.hostname,
            port=address.port or 3306,
            user=unquote(address.username or "root"),
            password=unquote(address.password or ""),
            database=address.path.lstrip("/"),
            # As in Java's drivers, `rowcount` includes rows that were found but not changed.
            client_flag=pymysql.constants.CLIENT.FOUND_ROWS,
        )
        self.integrity_error = pymysql.IntegrityError
        self.database_error = pymysql.Error

    def is_transient(self, error):
        return error.args[0] in (1205, 1213)


class JdbcLock:
    """JdbcLock, with the fields of its registry and of the repository."""

    def __init__(self, url, generation, region, key, ttl_ms, idle_ms):
        self.database = MariaDb(url) if url.startswith(("mysql:", "mariadb:")) else Postgres(url)
        self.generation = generation
        self.region = region
        self.key = lock_key(key)
        self.client_id = str(uuid.uuid4())
        self.ttl = timedelta(milliseconds=ttl_ms)
        self.idle_ms = idle_ms

    def try_lock(self):
        return self.in_transaction(self.acquire, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def lock(self, wait):
        while not self.try_lock():
            time.sleep(self.idle_ms / 1000)

    def unlock(self):
        if not self.in_transaction(self.delete):
            raise RuntimeError("Lock was released in the store due to expiration.")

    def acquire(self, cursor):
        row_key = (self.region, self.key)
        at = now()
        if self.generation == "v7":
            update = (self.client_id, at + self.ttl, *row_key, self.client_id, at)
        else:
            update = (self.client_id, at, *row_key, self.client_id, now() - self.ttl)
        cursor.execute(UPDATE[self.generation].format(prefix="INT_"), update)
        if cursor.rowcount > 0:
            return True
        # The original reads the clock again after the update.
        at = now()
        insert = (*row_key, self.client_id, at, at + self.ttl) if self.generation == "v7" else (*row_key, self.client_id, at)
        cursor.execute(INSERT[self.generation].format(prefix="INT_"), insert)
        return cursor.rowcount > 0

    def delete(self, cursor):
        cursor.execute(DELETE.format(prefix="INT_"), (self.region, self.key, self.client_id))
        return cursor.rowcount == 1

    def in_transaction(self, work, set_isolation=None):
        """Runs `work` in its own transaction. Transient errors are retried at once and without limit, as in the original."""
        connection = self.database.connection
        while True:
            try:
                with connection.cursor() as cursor:
                    if set_isolation:
                        # In MariaDB, the statement applies to the next transaction, which `work`
                        # begins. In PostgreSQL, the driver begins a transaction before it, and it
                        # applies to that one.
                        cursor.execute(set_isolation)
                    answer = work(cursor)
                connection.commit()
                return answer
            except self.database.integrity_error:
                connection.rollback()
                return False
            except self.database.database_error as error:
                connection.rollback()
                if not self.database.is_transient(error):
                    raise
