//! Every statement of the store. Each is a transaction of its own and one round trip, so nothing that is dropped half-way can leave one open.
//!
//! A row is held when it has a claim and `until` lies ahead. Of a claim that has no lease, because it ends with a connection, `until` is zero, wherever the
//! clock is put. All times are the server's, from `clock_timestamp()`: `now()` stands still in a
//! transaction, and so while a statement waits for a row.
//!
//! Nothing may be left to the session: behind a pooler every statement may meet another one. What a statement needs it sets for itself,
//! by `set_config(…, true)`, which lasts until its own end; where it stands decides when it is called.
//!
//! Whoever makes a key somebody else's locks its row FOR UPDATE, whoever renews or releases only FOR NO KEY UPDATE. Between the two stands
//! FOR KEY SHARE, by which a fenced transaction keeps out the former and lets the latter through.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlStr};

use super::config::TableNames;
use crate::mutant::{self, Mutant, Slip, slipped};

/// The version of the tables that this program reads and writes.
pub(super) const VERSION: i32 = 1;

/// Makes the tables. Several statements: for a connection of its own.
pub(super) const SCHEMA: &str = include_str!("schema.sql");

/// The text of every statement, for tables of these names.
#[derive(Debug, Clone)]
pub(super) struct Texts {
    pub(super) meta: Text,
    pub(super) acquire: Text,
    pub(super) take_again: Text,
    pub(super) look: Text,
    pub(super) holder: Text,
    pub(super) list: Text,
    pub(super) renew: Text,
    pub(super) release: Text,
    pub(super) force_release: Text,
    pub(super) end_row_holder: Text,
    pub(super) fence: Text,
    pub(super) lock_in: Text,
    pub(super) session_take: Text,
    pub(super) session_prepare: Text,
    pub(super) session_look: Text,
    pub(super) session_note: Text,
    pub(super) session_give_back: Text,
    pub(super) session_keep: Text,
    pub(super) lock_in_session: Text,
    pub(super) fence_held: Text,
    pub(super) row_note: Text,
    pub(super) row_lock: Text,
    pub(super) row_tell: Text,
    pub(super) locked_in: Text,
    pub(super) purge: Text,
}

impl Texts {
    pub(super) fn new(tables: &TableNames) -> Self {
        let now = mutant::clock(NOW);
        let text = |template: &str| {
            let text = template
                .replace("{claim_mark}", CLAIM_MARK)
                .replace("{locks}", &tables.locks())
                .replace("{meta}", &tables.meta())
                .replace("{now}", &now);
            Text::new(&text)
        };
        Self {
            meta: text(META),
            acquire: text(&slipped(ACQUIRE, &[TOKEN_STANDS_STILL])),
            take_again: text(&slipped(
                TAKE_AGAIN,
                &[TOKEN_STANDS_STILL_AGAIN, TAKES_WHAT_OTHERS_HOLD],
            )),
            look: text(LOOK),
            holder: text(&HOLDERS.replace("{who}", "id = $1::bytea").replace("{marked}", MARKED)),
            list: text(
                &HOLDERS.replace("{who}", "namespace = $1::bytea").replace("{marked}", MARKED),
            ),
            renew: text(&slipped(RENEW, &[RENEWAL_REVIVES])),
            release: text(&slipped(RELEASE, &[RELEASE_WITHOUT_OWNER])),
            force_release: text(FORCE_RELEASE),
            end_row_holder: text(&END_ROW_HOLDER.replace("{marked}", MARKED)),
            fence: text(&slipped(FENCE, &[FENCE_WITHOUT_LOCK])),
            lock_in: text(&lock_in("", "allowed WHERE NOT EXISTS (SELECT FROM held)", "false")),
            lock_in_session: text(&lock_in(
                LOCK_IN_SESSION,
                "tried WHERE got",
                "NOT (SELECT got FROM tried)",
            )),
            session_take: text(
                &SESSION_TAKE.replace("{taken}", "pg_try_advisory_lock($7::bigint)").replace(
                    "{unless_leased}",
                    "WHERE NOT EXISTS (SELECT FROM seen WHERE lease_left IS NOT NULL)",
                ),
            ),
            session_prepare: text(&slipped(&session_prepare(), &[SESSION_TRUSTS_ITS_MEMORY])),
            session_look: text(SESSION_LOOK),
            session_note: text(
                &SESSION_TAKE
                    .replace("{taken}", "$7::bigint IS NOT NULL")
                    .replace("{unless_leased}", ""),
            ),
            session_give_back: text(SESSION_GIVE_BACK),
            session_keep: text(SESSION_KEEP),
            fence_held: text(FENCE_HELD),
            row_note: text(ROW_NOTE),
            row_lock: text(ROW_LOCK),
            row_tell: text(ROW_TELL),
            locked_in: text(LOCKED_IN),
            purge: text(PURGE),
        }
    }
}

const RELEASE_WITHOUT_OWNER: Slip =
    Slip::new(Mutant::ReleaseWithoutOwner, "claim = $2::bytea", "$2::bytea IS NOT NULL");
const RENEWAL_REVIVES: Slip =
    Slip::new(Mutant::RenewalRevives, "l.until > {now}", "l.until IS NOT NULL");
// The clock would make up for it.
const TOKEN_STANDS_STILL: Slip = Slip::new(
    Mutant::TokenStandsStill,
    "greatest(excluded.token, l.token + l.block)",
    "greatest(0, l.token)",
);
const TOKEN_STANDS_STILL_AGAIN: Slip = Slip::new(
    Mutant::TokenStandsStill,
    "greatest({now}, l.token + l.block)",
    "greatest(0, l.token)",
);
const TAKES_WHAT_OTHERS_HOLD: Slip =
    Slip::new(Mutant::TakesAgainWhatOthersHold, "(claim IS NULL OR until <= {now})", "true");
const FENCE_WITHOUT_LOCK: Slip = Slip::new(Mutant::FenceWithoutLock, "FOR KEY SHARE", "");
const SESSION_TRUSTS_ITS_MEMORY: Slip =
    Slip::new(Mutant::SessionTrustsItsMemory, "AND claim = $2::bytea", "AND $2::bytea IS NOT NULL");

/// One statement. Its parameters are numbered, and each has its type beside it.
#[derive(Debug, Clone)]
pub(super) struct Text(Arc<str>);

impl Text {
    /// For what is asked once in a while.
    pub(super) fn new(text: &str) -> Self {
        Self(text.into())
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// For the client, which asks for a promise that no value was put into it.
    pub(super) fn safe(&self) -> SqlStr {
        use sqlx::SqlSafeStr as _;
        AssertSqlSafe(Arc::clone(&self.0)).into_sql_str()
    }
}

/// Microseconds since 1970. Not by `extract`, whose decimal numbers cost more than the rest of an expression.
const NOW: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint";

/// The last part: whether a transaction goes on seeing what was there when it began to read.
const META: &str = "SELECT version, store::text, current_setting('transaction_isolation') <> 'read committed' FROM {meta} WHERE id = 1";

/// Grants the key, unless somebody holds it, the claim itself included; then it says nothing, see [`LOOK`].
///
/// Who sees in its snapshot that the key is held does not touch the row, so a busy attempt costs no write and no flush. Who sees it free
/// locks the row, in the strongest way: that is what the assignment of `id` to itself is for. The clock is read anew behind that lock.
///
/// The new token is above those of this row as it was seen and as it is, and above those of all deleted rows.
///
/// It is not told in the same breath who holds the key: what that takes would cost each grant an eighth of its time on the server.
///
/// id, namespace, key, claim, block, label, lease
const ACQUIRE: &str = "\
    INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
    SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1, seen.token + seen.block), $5::bigint, $6::bytea, \
        now, now + $7::bigint \
    FROM (SELECT {now} AS now) AS clock \
        CROSS JOIN {meta} AS meta LEFT JOIN {locks} AS seen ON seen.id = $1::bytea \
    WHERE meta.id = 1 AND (seen.claim IS NULL OR seen.until <= now) \
    ON CONFLICT (id) DO UPDATE SET \
        id = excluded.id, \
        claim = excluded.claim, \
        token = greatest(excluded.token, l.token + l.block), \
        block = excluded.block, \
        label = excluded.label, \
        since = {now}, \
        until = {now} + $7::bigint \
    WHERE l.claim IS NULL OR l.until <= {now} \
    RETURNING token";

/// Grants the key like [`ACQUIRE`], if there is a row that nobody holds: for less of the server's time, as nothing is read that only a row
/// needs that is not there. Otherwise it says nothing.
///
/// The row is locked in the strongest way first, to keep out of a fence's way, which a mere update would not; whether it is free is judged behind that lock. Its own token
/// covers all of the key's that came before: a row is made above those of deleted ones.
///
/// id, claim, block, label, lease
const TAKE_AGAIN: &str = "\
    UPDATE {locks} AS l SET \
        claim = $2::bytea, \
        token = greatest({now}, l.token + l.block), \
        block = $3::bigint, \
        label = $4::bytea, \
        since = {now}, \
        until = {now} + $5::bigint \
    FROM (SELECT FROM {locks} WHERE id = $1::bytea AND (claim IS NULL OR until <= {now}) FOR UPDATE) AS free \
    WHERE l.id = $1::bytea \
    RETURNING token";

/// Who holds the key, if anybody.
///
/// id
const LOOK: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now) \
    SELECT claim, token, label, now - since, until - now FROM {locks}, clock \
    WHERE id = $1::bytea AND claim IS NOT NULL AND until > now";

/// Who holds one key or those of a namespace, by a lease, or by a transaction that has marked itself as that of the claim; see [`ROW_LOCK`].
///
/// id or namespace
const HOLDERS: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now) \
    SELECT key, token, label, now - since, CASE WHEN until > now THEN until - now END FROM {locks}, clock \
    WHERE {who} AND claim IS NOT NULL AND (until > now OR {claim_mark} IN (SELECT mark FROM ({marked}) AS marked))";

/// What transactions have marked themselves with, and the server's processes that they are in.
const MARKED: &str = "\
    SELECT (classid::bigint << 32) | objid::bigint AS mark, pid FROM pg_locks \
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// What a transaction marks itself with that holds the lock for the claim in the row; see [`ROW_LOCK`].
const CLAIM_MARK: &str = "('x' || encode(substr(claim, 1, 8), 'hex'))::bit(64)::bigint";

/// Prolongs the grants that are still alive, and tells of each that was asked for how long it lasts now, and whether it was there at all.
///
/// A row that somebody else has locked is passed over, so that it does not hold up the others; it is there, and not prolonged. As
/// nobody waits for a row here, nobody can wait in a circle.
///
/// ids, claims, leases
const RENEW: &str = "\
    WITH wanted AS MATERIALIZED ( \
        SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[]) WITH ORDINALITY AS w (id, claim, lease, n)), \
    found AS MATERIALIZED ( \
        SELECT l.id, w.claim, w.lease FROM wanted AS w JOIN {locks} AS l ON l.id = w.id AND l.claim = w.claim \
        WHERE l.until > {now} FOR NO KEY UPDATE OF l SKIP LOCKED), \
    renewed AS ( \
        UPDATE {locks} AS l SET until = greatest(l.until, {now} + found.lease) FROM found \
        WHERE l.id = found.id AND l.claim = found.claim AND l.until > {now} \
        RETURNING l.id, l.claim, l.until - {now} AS until) \
    SELECT renewed.until, \
        EXISTS (SELECT FROM {locks} AS l WHERE l.id = w.id AND l.claim = w.claim AND l.until > {now}) \
    FROM wanted AS w LEFT JOIN renewed ON renewed.id = w.id AND renewed.claim = w.claim ORDER BY w.n";

/// Ends the grant of one claim, and tells those who listen, if there are any; see [`Channel`](super::ears::Channel). The row stays, for its
/// tokens.
///
/// An ended grant is left as it is: it is as free as it can be, and the caller is told that it held nothing. The server need not have
/// written the release to its disk: one that a crash undoes costs the rest of the lease.
///
/// Unused tokens of the block are reserved again, so that tokens do not outrun the clock.
///
/// id, claim, channel, message, mark, tokens used
const RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now}, block = least(block, $6::bigint) \
    WHERE id = $1::bytea AND claim = $2::bytea AND until > {now} \
    RETURNING CASE WHEN NOT pg_try_advisory_xact_lock($5::bigint) THEN pg_notify($3::text, encode($4::bytea, 'hex')) IS NULL END, \
        set_config('synchronous_commit', 'off', true)";

/// Ends the grant of whoever holds the key, and tells those who listen.
///
/// id, channel, message
const FORCE_RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now} \
    WHERE id = $1::bytea AND claim IS NOT NULL AND until > {now} \
    RETURNING pg_notify($2::text, encode($3::bytea, 'hex')) IS NULL";

/// Ends the server's process whose transaction holds the key for the claim that is noted in the row, and waits for its end: whether it came in time.
///
/// id, milliseconds
const END_ROW_HOLDER: &str = "\
    WITH holder AS MATERIALIZED ( \
        SELECT marked.pid FROM {locks} JOIN ({marked}) AS marked ON marked.mark = {claim_mark} WHERE id = $1::bytea AND claim IS NOT NULL) \
    SELECT pg_terminate_backend(pid, $2::bigint) FROM holder";

/// Finds the grant as it was made, and keeps the row from becoming anybody else's until the caller's transaction ends.
///
/// id, claim, token
const FENCE: &str = "\
    SELECT true FROM {locks} \
    WHERE id = $1::bytea AND claim = $2::bytea AND token <= $3::bigint AND $3::bigint < token + block AND until > {now} \
    FOR KEY SHARE";

/// [`LOCK_IN`] for those that this chooses.
fn lock_in(tried: &str, who: &str, kept_out: &str) -> String {
    LOCK_IN.replace("{tried}", tried).replace("{who}", who).replace("{kept_out}", kept_out)
}

/// Where locks are sessions' ([`SESSION_TAKE`]), the transaction needs what they need, too.
///
/// number
const LOCK_IN_SESSION: &str = "\
    tried AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($9::bigint) AS got FROM allowed WHERE NOT EXISTS (SELECT FROM held)),";

/// Locks the row for the caller's transaction, unless somebody holds a lease on it; and tells how long that still lasts.
///
/// Like [`ACQUIRE`], but that it grants no lease: what is committed is a free row with a larger token, and those who wait are told then. Locks nothing in a
/// transaction with a snapshot that is older than the lock. Its last columns: the isolation level of such a transaction, two of no interest, and whether a
/// session has the lock, see [`LOCK_IN_SESSION`]. The advisory lock is a mark for others who find the row locked; nobody ever waits for it. The limit for the wait is put back, as it is the caller's.
///
/// id, namespace, key, store, lock_timeout, mark, channel, message
const LOCK_IN: &str = "\
    WITH patience AS MATERIALIZED ( \
        SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $5::text, true)), \
    clock AS MATERIALIZED (SELECT {now} AS now), \
    meta AS MATERIALIZED (SELECT floor FROM {meta} WHERE id = 1 AND store = $4::text::uuid), \
    level AS MATERIALIZED (SELECT current_setting('transaction_isolation') AS name), \
    allowed AS MATERIALIZED (SELECT floor FROM meta, level WHERE name LIKE 'read %'), \
    seen AS MATERIALIZED (SELECT claim, token, block, until FROM {locks} WHERE id = $1::bytea), \
    held AS (SELECT seen.* FROM seen, clock WHERE claim IS NOT NULL AND until > now), \
    {tried} \
    marked AS MATERIALIZED (SELECT pg_try_advisory_xact_lock_shared($6::bigint) FROM {who}), \
    taken AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, NULL, \
            greatest(now, floor + 1, (SELECT token + block FROM seen)), 1, NULL, now, now \
        FROM patience, clock, allowed, marked \
        ON CONFLICT (id) DO UPDATE SET \
            id = excluded.id, \
            claim = NULL, \
            token = greatest(excluded.token, l.token + l.block, {now}), \
            block = 1, \
            label = NULL, \
            since = {now}, \
            until = {now} \
        WHERE l.claim IS NULL OR l.until <= {now} \
        RETURNING token) \
    SELECT meta.floor IS NOT NULL, taken.token, held.until - now, \
        CASE WHEN level.name NOT LIKE 'read %' THEN level.name END, \
        set_config('lock_timeout', patience.was, true), \
        CASE WHEN taken.token IS NOT NULL THEN pg_notify($7::text, encode($8::bytea, 'hex')) IS NULL END, {kept_out} \
    FROM patience CROSS JOIN clock CROSS JOIN level LEFT JOIN meta ON true LEFT JOIN taken ON true LEFT JOIN held ON true";

/// Takes an advisory lock for the session, unless it has it, and notes a larger token in the row, which is a free one for those who want a lease.
///
/// Returns no token if somebody holds a lease, or if another transaction has locked the row. Then the session does not have the advisory lock
/// afterwards, and nobody is told of it: whoever were told would try in vain, and wake the others in turn. After an error, which takes back everything
/// else, the lock must be given back.
///
/// Waits for no row: all locks of the session would wait with it. The limit is for a row that another transaction has inserted and not committed.
///
/// As in [`ACQUIRE`] the token is above those of the row as it was seen: it may be deleted meanwhile, and the floor that it was seen with
/// does not cover it yet.
///
/// Nothing waits for the disk, unless the token is ahead of the clock: a session does not survive a crash, and any other token that was lost in one is
/// below the clock.
///
/// id, namespace, key, claim, block, label, number, lock_timeout
const SESSION_TAKE: &str = "\
    WITH ease AS MATERIALIZED (SELECT set_config('lock_timeout', $8::text, true)), \
    seen AS MATERIALIZED ( \
        SELECT token, block, CASE WHEN claim IS NOT NULL AND until > {now} THEN until - {now} END AS lease_left \
        FROM {locks}, ease WHERE id = $1::bytea), \
    tried AS MATERIALIZED (SELECT {taken} AS got FROM ease {unless_leased}), \
    clock AS MATERIALIZED (SELECT {now} AS now FROM tried WHERE got), \
    mine AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l, clock WHERE l.id = $1::bytea FOR UPDATE OF l SKIP LOCKED), \
    taken AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1, seen.token + seen.block), $5::bigint, $6::bytea, now, 0 \
        FROM clock CROSS JOIN {meta} AS meta LEFT JOIN seen ON true \
        WHERE meta.id = 1 AND (seen.token IS NULL OR EXISTS (SELECT FROM mine)) \
        ON CONFLICT (id) DO UPDATE SET \
            id = excluded.id, \
            claim = excluded.claim, \
            token = greatest(excluded.token, l.token + l.block, {now}), \
            block = excluded.block, \
            label = excluded.label, \
            since = {now}, \
            until = 0 \
        WHERE l.claim IS NULL OR l.until <= {now} \
        RETURNING token) \
    SELECT pg_backend_pid(), coalesce(tried.got, false), taken.token, seen.lease_left, \
        coalesce(tried.got, false) AND seen.token IS NOT NULL AND NOT EXISTS (SELECT FROM mine), \
        CASE WHEN taken.token <= {now} THEN set_config('synchronous_commit', 'off', true) END, \
        CASE WHEN tried.got AND taken.token IS NULL THEN pg_advisory_unlock($7::bigint) END \
    FROM ease LEFT JOIN tried ON true LEFT JOIN taken ON true LEFT JOIN seen ON true";

/// Takes an advisory lock for the session. Prepared by [`SESSION_PREPARE`].
///
/// number
const SESSION_TRY: &str = "SELECT pg_backend_pid(), pg_try_advisory_lock($1::bigint)";

/// What time it is, if this claim is still noted in the row.
///
/// id, claim
const SESSION_SEEN: &str = "SELECT {now} FROM {locks} WHERE id = $1::bytea AND claim = $2::bytea";

/// Keeps [`SESSION_TRY`] and [`SESSION_SEEN`] prepared, for [`SESSION_LOOK`].
fn session_prepare() -> String {
    format!(
        "PREPARE lock_registry_try (bigint) AS {SESSION_TRY}; PREPARE lock_registry_seen (bytea, bytea) AS {SESSION_SEEN}"
    )
}

/// Takes an advisory lock for the session, and looks whether a claim of this session is still noted in the row, and what time it is. Changes nothing.
///
/// Two statements in one message: the second one sees what was committed until it begins (READ COMMITTED, which the session has asked for), and so all that
/// was done by those who had the lock before. One statement would see the row as it was before it had the lock.
///
/// number, id, claim
const SESSION_LOOK: &str = "\
    EXECUTE lock_registry_try ($1::bigint); EXECUTE lock_registry_seen ($2::bytea, $3::bytea)";

/// Gives an advisory lock back, and tells those who listen, if there are any; see [`Channel`](super::ears::Channel). The mark is this transaction's until the
/// lock is free for all to see, whichever of the two is done first. Only a message is something that the server would flush.
///
/// number, channel, message, mark
const SESSION_GIVE_BACK: &str = "\
    SELECT pg_backend_pid(), pg_advisory_unlock($1::bigint), \
        CASE WHEN NOT pg_try_advisory_xact_lock($4::bigint) THEN \
            set_config('synchronous_commit', 'off', true) IS NULL OR pg_notify($2::text, encode($3::bytea, 'hex')) IS NULL END";

/// Has the row there with this claim noted in it, by the session that has the lock: rows without a lease are purged after a while, and a claim whose token was
/// reserved by an earlier one of the session is not noted yet.
///
/// id, namespace, key, claim, token, block, lock_timeout, noted
const SESSION_KEEP: &str = "\
    WITH ease AS MATERIALIZED ( \
        SELECT set_config('lock_timeout', $7::text, true), set_config('synchronous_commit', 'off', true)), \
    clock AS MATERIALIZED (SELECT {now} AS now FROM ease), \
    kept AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, $5::bigint, $6::bigint, NULL, now, 0 FROM clock \
        ON CONFLICT (id) DO UPDATE SET \
            claim = excluded.claim, \
            token = excluded.token, \
            block = excluded.block, \
            since = greatest(l.since, {now}) \
        WHERE l.claim = $8::bytea AND l.token <= excluded.token AND excluded.token < l.token + l.block \
        RETURNING id) \
    SELECT pg_backend_pid(), (SELECT count(*) FROM kept) FROM ease";

/// Like [`FENCE`], for a lock that ends with a connection: whoever comes next changes the row first, whatever became of the connection.
///
/// id, claim, token
const FENCE_HELD: &str = "\
    SELECT true FROM {locks} \
    WHERE id = $1::bytea AND claim = $2::bytea AND token <= $3::bigint AND $3::bigint < token + block \
    FOR KEY SHARE";

/// Notes a claim and a larger token in the row, unless somebody holds a lease on it or a transaction has locked it; and tells whether there
/// is a lease. What is left is a free row, for those who want one.
///
/// Nothing waits for the disk, unless the token is ahead of the clock: what follows does not survive a crash, and any other token that was lost in one is
/// below the clock.
///
/// id, namespace, key, claim, block, label, lock_timeout
const ROW_NOTE: &str = "\
    WITH ease AS MATERIALIZED (SELECT set_config('lock_timeout', $7::text, true)), \
    seen AS MATERIALIZED ( \
        SELECT claim IS NOT NULL AND until > {now} AS leased FROM {locks}, ease WHERE id = $1::bytea), \
    found AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l \
        WHERE l.id = $1::bytea AND (l.claim IS NULL OR l.until <= {now}) AND EXISTS (SELECT FROM seen) \
        FOR UPDATE SKIP LOCKED), \
    noted AS ( \
        UPDATE {locks} AS l SET \
            id = l.id, \
            claim = $4::bytea, \
            token = greatest({now}, l.token + l.block), \
            block = $5::bigint, \
            label = $6::bytea, \
            since = {now}, \
            until = 0 \
        FROM found WHERE l.id = found.id \
        RETURNING l.token), \
    made AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1), $5::bigint, $6::bytea, now, 0 \
        FROM (SELECT {now} AS now, floor FROM {meta} WHERE id = 1) AS meta, ease \
        WHERE NOT EXISTS (SELECT FROM seen) \
        ON CONFLICT (id) DO NOTHING \
        RETURNING token), \
    granted AS (SELECT coalesce((SELECT token FROM noted), (SELECT token FROM made)) AS token) \
    SELECT token, EXISTS (SELECT FROM seen WHERE leased), \
        CASE WHEN token <= {now} THEN set_config('synchronous_commit', 'off', true) END \
    FROM granted";

/// Locks the row for a transaction, if the claim is noted in it, and marks the transaction as one with this lock, and as that of the claim; for the second of two
/// statements, of which the first one begins it. Tells which transaction of which process it is, and nothing if nothing was locked.
///
/// From then on the server ends the transaction if it hears nothing for too long, but not because of its age.
///
/// id, claim, mark, silence, mark of the claim
const ROW_LOCK: &str = "\
    WITH ease AS MATERIALIZED ( \
        SELECT set_config('idle_in_transaction_session_timeout', $4::text, true), set_config('tcp_user_timeout', $4::text, true), \
            set_config('tcp_keepalives_idle', '30', true), set_config('tcp_keepalives_interval', '10', true), \
            set_config('tcp_keepalives_count', '3', true), set_config('synchronous_commit', 'off', true), \
            CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true) END), \
    mine AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l WHERE l.id = $1::bytea AND l.claim = $2::bytea FOR NO KEY UPDATE SKIP LOCKED), \
    marked AS MATERIALIZED ( \
        SELECT pg_try_advisory_xact_lock_shared($3::bigint), pg_try_advisory_xact_lock_shared($5::bigint) FROM mine, ease) \
    SELECT pg_backend_pid(), pg_current_xact_id()::text FROM marked";

/// Tells those who listen, if there are any, when the transaction is committed; see [`Channel`](super::ears::Channel).
///
/// channel, message, mark
const ROW_TELL: &str = "\
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock($3::bigint) THEN pg_notify($1::text, encode($2::bytea, 'hex')) IS NULL END";

/// Whether a transaction has marked itself as one with this lock.
///
/// mark
const LOCKED_IN: &str = "\
    SELECT EXISTS ( \
        SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
            AND classid::bigint = (($1::bigint >> 32) & 4294967295) AND objid::bigint = ($1::bigint & 4294967295))";

/// Deletes the dead rows of a piece; a trigger keeps the largest of their tokens. The rows of a piece follow a place that is chosen at
/// random: ids are hashes, so all rows are found equally often.
///
/// place, rows, microseconds that a row must have been dead for
const PURGE: &str = "\
    WITH ease AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)), \
    piece AS MATERIALIZED (SELECT id, greatest(since, until) AS until FROM {locks} WHERE id >= $1::bytea ORDER BY id LIMIT $2::bigint), \
    dead AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l \
        WHERE l.id IN (SELECT id FROM piece WHERE until <= {now} - $3::bigint) AND greatest(l.since, l.until) <= {now} - $3::bigint \
        FOR UPDATE SKIP LOCKED), \
    deleted AS (DELETE FROM {locks} AS l USING dead, ease WHERE l.id = dead.id RETURNING l.id) \
    SELECT count(*) FROM deleted";
