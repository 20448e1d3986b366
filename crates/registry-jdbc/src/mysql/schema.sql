-- The tables of lock-registry's MariaDB and MySQL store, version 1. Safe to run again; `MySqlBackend::open` does so by itself
-- unless it finds them. They are made in the database of the connection.
--
-- Who only locks needs no more than:
--   GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_locks TO …;
--   GRANT SELECT, UPDATE ON lock_registry_meta TO …;
--
-- To delete rows by hand is safe as long as the server's clock was never set back: new tokens are at least that clock's microseconds.

-- One row for each key that was locked lately. Times are microseconds since 1970 on the server's clock. Keys are bytes: those that differ
-- only in case or accents are different keys.
CREATE TABLE IF NOT EXISTS lock_registry_locks (
    id        BINARY(32)      NOT NULL PRIMARY KEY COMMENT 'SHA-256 of namespace and key, which are too long for an index',
    namespace VARBINARY(255)  NOT NULL COMMENT 'UTF-8',
    lock_key  VARBINARY(4096) NOT NULL COMMENT 'UTF-8',
    claim     BINARY(16)               COMMENT 'who holds it; NULL after a release',
    token     BIGINT          NOT NULL COMMENT 'the first fencing token of the newest grant',
    block     BIGINT          NOT NULL COMMENT 'how many tokens it reserved',
    label     VARBINARY(1024)          COMMENT 'UTF-8',
    since     BIGINT          NOT NULL,
    until     BIGINT          NOT NULL COMMENT 'held until then, or free since then'
) ENGINE = InnoDB;

-- One row for all namespaces.
CREATE TABLE IF NOT EXISTS lock_registry_meta (
    id      TINYINT    NOT NULL PRIMARY KEY,
    version INT        NOT NULL COMMENT 'of these tables',
    store   BINARY(16) NOT NULL COMMENT 'tells these tables from others',
    floor   BIGINT     NOT NULL COMMENT 'the largest token of all purged rows'
) ENGINE = InnoDB;

INSERT IGNORE INTO lock_registry_meta (id, version, store, floor)
VALUES (1, 1, UNHEX(REPLACE(UUID(), '-', '')), 0);
