-- The tables of lock-registry's PostgreSQL store, version 1. They are created in the first schema
-- of the search_path. The script may be run repeatedly. `PostgresBackend::open` runs it unless the
-- tables exist.
--
-- Locking needs these rights:
--   GRANT USAGE ON SCHEMA … TO …;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_locks TO …;
--   GRANT SELECT, UPDATE ON lock_registry_meta TO …;
--   GRANT SELECT, INSERT, UPDATE ON lock_registry_values TO …;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_waiters TO …;
-- Without the last one, locking works, and waiters are not listed.

-- One row for all namespaces.
CREATE TABLE IF NOT EXISTS lock_registry_meta (
    id      smallint NOT NULL PRIMARY KEY CHECK (id = 1),
    version integer  NOT NULL,                      -- of these tables
    store   uuid     NOT NULL,                      -- distinguishes these tables from others
    floor   bigint   NOT NULL                       -- the largest token of all deleted rows
);

INSERT INTO lock_registry_meta (id, version, store, floor)
VALUES (1, 1, gen_random_uuid(), 0)
ON CONFLICT (id) DO NOTHING;

-- One row for each recently locked key. Times are microseconds since 1970 on the server's clock.
CREATE TABLE IF NOT EXISTS lock_registry_locks (
    id        bytea  NOT NULL PRIMARY KEY,          -- SHA-256 of namespace and key, which are too long for an index
    namespace bytea  NOT NULL,                      -- UTF-8
    key       bytea  NOT NULL,                      -- UTF-8
    claim     bytea,                                -- the claim that holds the key; NULL after a release
    token     bigint NOT NULL,                      -- the first fencing token of the newest grant
    block     bigint NOT NULL,                      -- the number of tokens that the newest grant reserved
    label     bytea,                                -- UTF-8; the record of all claims if several hold the key
    since     bigint NOT NULL,
    until     bigint NOT NULL                       -- held until then, or free since then
) WITH (fillfactor = 70);

-- Records the tokens of deleted rows, so that tokens keep growing, whatever client deletes them.
CREATE OR REPLACE FUNCTION lock_registry_purged() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    gone text := CASE TG_OP WHEN 'DELETE' THEN 'deleted' ELSE format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME) END;
BEGIN
    EXECUTE format(
        'UPDATE %I.lock_registry_meta AS meta SET floor = gone.token '
        'FROM (SELECT max(token + block - 1) AS token FROM %s) AS gone WHERE meta.id = 1 AND meta.floor < gone.token',
        TG_TABLE_SCHEMA, gone);
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER lock_registry_deleted AFTER DELETE ON lock_registry_locks
REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT EXECUTE FUNCTION lock_registry_purged();

CREATE OR REPLACE TRIGGER lock_registry_truncated BEFORE TRUNCATE ON lock_registry_locks
FOR EACH STATEMENT EXECUTE FUNCTION lock_registry_purged();

-- The value blocks of keys. A row is never deleted.
CREATE TABLE IF NOT EXISTS lock_registry_values (
    id        bytea  NOT NULL PRIMARY KEY,          -- as in lock_registry_locks
    namespace bytea  NOT NULL,                      -- UTF-8
    key       bytea  NOT NULL,                      -- UTF-8
    token     bigint NOT NULL,                      -- the fencing token of the writer
    value     bytea  NOT NULL
);

-- The claims that wait, for listings. Locking does not depend on this table.
CREATE TABLE IF NOT EXISTS lock_registry_waiters (
    id        bytea  NOT NULL,                      -- as in lock_registry_locks
    claim     bytea  NOT NULL,                      -- the claim that waits
    namespace bytea  NOT NULL,                      -- UTF-8
    key       bytea  NOT NULL,                      -- UTF-8
    mode      bytea  NOT NULL,                      -- ASCII, such as exclusive
    label     bytea,                                -- UTF-8
    since     bigint NOT NULL,
    until     bigint NOT NULL,                      -- the row has no meaning after that
    PRIMARY KEY (id, claim)
);
