-- The tables of lock-registry's MariaDB and MySQL store, version 1. They are created in the
-- database of the connection. The script may be run repeatedly. `MySqlBackend::open` runs it
-- unless the tables exist.
--
-- Locking needs these rights:
--   GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_locks TO …;
--   GRANT SELECT, UPDATE ON lock_registry_meta TO …;
--   GRANT SELECT, INSERT, UPDATE ON lock_registry_values TO …;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_waiters TO …;
-- Without the last one, locking works, and waiters are not listed.
--
-- Rows may be deleted manually if the server's clock was never set back: new tokens are at least
-- that clock's microseconds.

-- One row for each recently locked key. Times are microseconds since 1970 on the server's clock.
-- Keys are bytes: two keys that differ only in case or accents are different keys.
CREATE TABLE IF NOT EXISTS lock_registry_locks (
    id        BINARY(32)      NOT NULL PRIMARY KEY COMMENT 'SHA-256 of namespace and key, which are too long for an index',
    namespace VARBINARY(255)  NOT NULL COMMENT 'UTF-8',
    lock_key  VARBINARY(4096) NOT NULL COMMENT 'UTF-8',
    claim     BINARY(16)               COMMENT 'the claim that holds the key; NULL after a release',
    token     BIGINT          NOT NULL COMMENT 'the first fencing token of the newest grant',
    block     BIGINT          NOT NULL COMMENT 'the number of tokens that the newest grant reserved',
    label     MEDIUMBLOB               COMMENT 'UTF-8; the record of all claims if several hold the key',
    since     BIGINT          NOT NULL,
    until     BIGINT          NOT NULL COMMENT 'held until then, or free since then'
) ENGINE = InnoDB;

-- The value blocks of keys. A row is never deleted.
CREATE TABLE IF NOT EXISTS lock_registry_values (
    id        BINARY(32)      NOT NULL PRIMARY KEY COMMENT 'as in lock_registry_locks',
    namespace VARBINARY(255)  NOT NULL COMMENT 'UTF-8',
    lock_key  VARBINARY(4096) NOT NULL COMMENT 'UTF-8',
    token     BIGINT          NOT NULL COMMENT 'the fencing token of the writer',
    value     BLOB            NOT NULL
) ENGINE = InnoDB;

-- The claims that wait, for listings. Locking does not depend on this table.
CREATE TABLE IF NOT EXISTS lock_registry_waiters (
    id        BINARY(32)      NOT NULL COMMENT 'as in lock_registry_locks',
    claim     BINARY(16)      NOT NULL COMMENT 'the claim that waits',
    namespace VARBINARY(255)  NOT NULL COMMENT 'UTF-8',
    lock_key  VARBINARY(4096) NOT NULL COMMENT 'UTF-8',
    mode      VARBINARY(64)   NOT NULL COMMENT 'ASCII, such as exclusive',
    label     MEDIUMBLOB               COMMENT 'UTF-8',
    since     BIGINT          NOT NULL,
    until     BIGINT          NOT NULL COMMENT 'the row has no meaning after that',
    PRIMARY KEY (id, claim)
) ENGINE = InnoDB;

-- One row for all namespaces.
CREATE TABLE IF NOT EXISTS lock_registry_meta (
    id      TINYINT    NOT NULL PRIMARY KEY,
    version INT        NOT NULL COMMENT 'of these tables',
    store   BINARY(16) NOT NULL COMMENT 'distinguishes these tables from others',
    floor   BIGINT     NOT NULL COMMENT 'the largest token of all purged rows'
) ENGINE = InnoDB;

INSERT IGNORE INTO lock_registry_meta (id, version, store, floor)
VALUES (1, 1, UNHEX(REPLACE(UUID(), '-', '')), 0);
