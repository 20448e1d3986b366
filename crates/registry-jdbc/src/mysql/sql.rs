//! Every statement of the store. Of a claim that has no lease, because it ends with a connection, `until` is zero, wherever the clock is put.
//!
//! Each is a transaction of its own and one round trip, so nothing that is dropped half-way can leave one open.
//!
//! A row is held when it has a claim and `until` lies ahead. All times are the server's, as of the moment when it began the statement: that is what
//! it also tells its replicas, and what `UTC_TIMESTAMP` gives wherever it stands in a statement, whatever the session's time zone. While the statement waits for a row this
//! moment grows old, which errs on the safe side each time:
//!
//! - a lease that is granted or renewed is counted from the past, so it ends no later than its holder thinks;
//! - somebody else's lease looks as if it had more of its time left, so it is not taken for ended too early;
//! - a token is above those of the row as it is then, whatever the clock says;
//! - a renewal may prolong a lease that ended while it waited, but only if nobody took the key meanwhile: then nobody else was
//!   granted it, and from here on nobody is.
//!
//! What is written is the same for MariaDB and for MySQL, which knows no RETURNING.

use std::sync::{Arc, LazyLock};

use registry_core::ClaimId;
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use crate::mutant::{self, Mutant, Slip, slipped};

/// The version of the tables that this program reads and writes.
pub(super) const VERSION: i32 = 1;

/// Makes the tables. Several statements: for a connection of its own.
pub(super) const SCHEMA: &str = include_str!("schema.sql");

/// What every connection is told: rules that do not depend on how the server is set up, which may make each COMMIT end the connection. A statement of its own sees what is committed, and a
/// select in front of a write locks nothing.
pub(super) const SESSION: &str = "\
    SET SESSION autocommit = 1, completion_type = 0, time_zone = '+00:00', sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', \
        innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}; \
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE";

/// For the connection of a session, on which all of its locks would wait with one. MariaDB waits for no row then; MySQL knows no limit
/// below a second, and takes the second part for a comment.
pub(super) const SESSION_WAITS_FOR_NO_ROW: &str =
    "SET SESSION innodb_lock_wait_timeout = 1 /*M! - 1 */";

/// How many renewals, or keys that are looked at, one statement takes. A few fixed sizes, filled up with NULLs that match nothing, keep the
/// number of texts small that the server has to keep prepared.
pub(super) const SIZES: [usize; 4] = [1, 8, 64, 1024];

/// The smallest of [`SIZES`] that takes `items`, or the largest there is.
pub(super) fn size(items: usize) -> usize {
    SIZES.into_iter().find(|&size| size >= items).unwrap_or(SIZES[SIZES.len() - 1])
}

/// The text of every statement, for tables of these names.
#[derive(Debug)]
pub(super) struct Texts {
    pub(super) meta: Text,
    pub(super) meta_now: Text,
    pub(super) acquire: Text,
    pub(super) take_again: Text,
    pub(super) look: Text,
    pub(super) holder: Text,
    pub(super) holder_by_lease: Text,
    pub(super) list: Text,
    pub(super) list_by_lease: Text,
    pub(super) holding: Text,
    pub(super) renew: [Text; SIZES.len()],
    pub(super) lasting: [Text; SIZES.len()],
    pub(super) held: [Text; SIZES.len()],
    pub(super) release: Text,
    pub(super) force_release: Text,
    pub(super) fence: Text,
    pub(super) is_free: Text,
    pub(super) clear_ended: Text,
    pub(super) make_row: Text,
    pub(super) lock_row: Text,
    pub(super) row_seen_in: Text,
    pub(super) raise_token: Text,
    pub(super) session_note: Text,
    pub(super) session_look: Text,
    pub(super) session_is_free: Text,
    pub(super) session_keep: Text,
    pub(super) session_mark: Text,
    pub(super) fence_held: Text,
    pub(super) row_note: Text,
    pub(super) row_lock: Text,
    pub(super) row_seen: Text,
    pub(super) piece: Text,
    pub(super) raise_floor: Text,
    pub(super) purge: [Text; SIZES.len()],
}

impl Texts {
    /// The tables are in this database, and their names begin with `prefix`.
    pub(super) fn new(database: &str, prefix: &str) -> Self {
        let database = quoted(database);
        let now = mutant::clock(NOW);
        let text = |template: &str, items: usize| {
            let text = template
                .replace("{free}", FREE)
                .replace("{items}", &vec!["?"; items].join(", "))
                .replace("{is_seen}", IS_SEEN)
                .replace("{holding}", HOLDING_CONNECTION)
                .replace("{locks}", &format!("{database}.{prefix}_locks"))
                .replace("{meta}", &format!("{database}.{prefix}_meta"))
                .replace("{writable}", WRITABLE)
                .replace("{now}", &now);
            Text::new(&text)
        };
        let one = |template| text(template, 1);
        let sized = |template| SIZES.map(|items| text(template, items));
        Self {
            meta: one(META),
            meta_now: one(&format!("{META} LOCK IN SHARE MODE")),
            acquire: one(&slipped(&ACQUIRE, &[TOKEN_STANDS_STILL]).replace("{end}", "{now} + ?")),
            take_again: one(&slipped(
                TAKE_AGAIN,
                &[TOKEN_STANDS_STILL_AGAIN, TAKES_WHAT_OTHERS_HOLD],
            )),
            look: one(LOOK),
            holder: one(&holders("id = ?", HOLDING_CONNECTION)),
            holder_by_lease: one(&holders("id = ?", "NULL")),
            list: one(&holders("namespace = ?", HOLDING_CONNECTION)),
            list_by_lease: one(&holders("namespace = ?", "NULL")),
            holding: one(HOLDING),
            renew: sized(&slipped(RENEW, &[RENEWAL_REVIVES])),
            lasting: sized(&slipped(LASTING, &[RENEWAL_REVIVES])),
            held: sized(HELD),
            release: one(&slipped(RELEASE, &[RELEASE_WITHOUT_OWNER])),
            force_release: one(FORCE_RELEASE),
            fence: one(&slipped(FENCE, &[FENCE_WITHOUT_LOCK])),
            is_free: one(IS_FREE),
            clear_ended: one(CLEAR_ENDED),
            make_row: one(MAKE_ROW),
            lock_row: one(LOCK_ROW),
            row_seen_in: one(ROW_SEEN_IN),
            raise_token: one(RAISE_TOKEN),
            session_note: one(&ACQUIRE.replace("{end}", "0")),
            session_look: one(&slipped(SESSION_LOOK, &[SESSION_TRUSTS_ITS_MEMORY])),
            session_is_free: one(SESSION_IS_FREE),
            session_keep: one(SESSION_KEEP),
            session_mark: one(SESSION_MARK),
            fence_held: one(FENCE_HELD),
            row_note: one(ROW_NOTE),
            row_lock: one(ROW_LOCK),
            row_seen: one(ROW_SEEN),
            piece: one(PIECE),
            raise_floor: one(RAISE_FLOOR),
            purge: sized(PURGE),
        }
    }

    /// The text among `sizes` for so many items.
    pub(super) fn sized(sizes: &[Text; SIZES.len()], items: usize) -> &Text {
        let size = size(items);
        let place = SIZES.iter().position(|&known| known == size);
        &sizes[place.expect("a size is chosen from these")]
    }
}

const RELEASE_WITHOUT_OWNER: Slip =
    Slip::new(Mutant::ReleaseWithoutOwner, "claim = ?", "claim <> ?");
const RENEWAL_REVIVES: Slip =
    Slip::new(Mutant::RenewalRevives, "until > {now}", "until IS NOT NULL");
// The clock would make up for it.
const TOKEN_STANDS_STILL: Slip = Slip::new(
    Mutant::TokenStandsStill,
    "GREATEST(VALUES(token), {locks}.token + {locks}.block)",
    "GREATEST(0, {locks}.token)",
);
const TOKEN_STANDS_STILL_AGAIN: Slip =
    Slip::new(Mutant::TokenStandsStill, "GREATEST({now}, token + block)", "GREATEST(0, token)");
const TAKES_WHAT_OTHERS_HOLD: Slip =
    Slip::new(Mutant::TakesAgainWhatOthersHold, "(claim IS NULL OR until <= {now})", "TRUE");
const FENCE_WITHOUT_LOCK: Slip = Slip::new(Mutant::FenceWithoutLock, "FOR UPDATE", "");
const SESSION_TRUSTS_ITS_MEMORY: Slip =
    Slip::new(Mutant::SessionTrustsItsMemory, "AND l.claim = ?", "AND ? IS NOT NULL");

/// One statement. Its parameters have no numbers: a value that is needed twice is given twice.
#[derive(Debug, Clone)]
pub(super) struct Text(Arc<str>);

impl Text {
    pub(super) fn new(text: &str) -> Self {
        Self(text.into())
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// For the client, which asks for a promise that no value was put into it.
    pub(super) fn safe(&self) -> SqlStr {
        AssertSqlSafe(Arc::clone(&self.0)).into_sql_str()
    }
}

/// Makes the tables, for names that begin with `prefix`.
pub(super) fn schema(prefix: &str) -> SqlStr {
    AssertSqlSafe(SCHEMA.replace("lock_registry", prefix)).into_sql_str()
}

/// [`SESSION`] with this patience, in whole seconds: the server counts no others.
pub(super) fn session(patience_seconds: u64) -> SqlStr {
    AssertSqlSafe(SESSION.replace("{patience}", &patience_seconds.to_string())).into_sql_str()
}

pub(super) fn quoted(identifier: &str) -> String {
    format!("`{}`", identifier.replace('`', "``"))
}

/// Whole numbers all the way. Unlike `UNIX_TIMESTAMP` it knows years after 2038.
pub(super) const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// Whether the row that stands in the way of an insert can be had.
const FREE: &str = "{locks}.claim IS NULL OR {locks}.until <= VALUES(since)";

/// Whether the server means to be written to. A replica refuses users with few rights by itself, and lets those with many do as they like: they would
/// be granted there what somebody holds at the primary. Cast, because some servers tell a number and some a word.
pub(super) const WRITABLE: &str = "CAST(@@global.read_only AS CHAR) IN ('0', 'OFF')";

const META: &str = "SELECT version, store, {writable} FROM {meta} WHERE id = 1";

/// Grants the key, unless somebody holds it, the claim itself included. The token comes back as the *last insert id*, in the answer to the
/// statement itself; zero says that nothing was granted. (The number of rows does not tell: this client has a row counted that was found and
/// left as it is.)
///
/// Who sees in its snapshot that the key is held selects nothing, so a busy attempt costs no write, no lock and no flush; then nothing sets the
/// id, and it is zero. Who sees it free inserts, or meets a row. If that is held by now, because somebody was faster, all columns keep their
/// values, and the id that the select has set is set to zero again.
///
/// Assignments are made from left to right and see what was assigned before. So the columns by which a row is known to be free change last:
/// `claim` when the others are done, and `until` when it can be seen from the new `claim` and `since` that this grant was made just now.
///
/// The new token is above those of this row as it was seen and as it is, and above those of all purged rows: in a snapshot, a row is there or
/// the floor covers it.
///
/// Without a lease, and its end, it is what a session notes.
///
/// id, namespace, key, claim, block, label, lease, id
static ACQUIRE: LazyLock<String> = LazyLock::new(|| {
    let kept =
        |column: &str| format!("{column} = IF({{free}}, VALUES({column}), {{locks}}.{column})");
    format!(
        "INSERT INTO {{locks}} (id, namespace, lock_key, claim, token, block, label, since, until) \
         SELECT ?, ?, ?, ?, \
             LAST_INSERT_ID(GREATEST({{now}}, meta.floor + 1, COALESCE(seen.token + seen.block, 0))), \
             ?, ?, {{now}}, {{end}} \
         FROM {{meta}} AS meta LEFT JOIN {{locks}} AS seen ON seen.id = ? \
         WHERE meta.id = 1 AND (seen.claim IS NULL OR seen.until <= {{now}}) AND {{writable}} \
         ON DUPLICATE KEY UPDATE \
             token = IF({{free}}, \
                 LAST_INSERT_ID(GREATEST(VALUES(token), {{locks}}.token + {{locks}}.block)), \
                 {{locks}}.token + LAST_INSERT_ID(0)), \
             {}, {}, {}, {}, \
             until = IF({{locks}}.claim = VALUES(claim) AND {{locks}}.since = VALUES(since), \
                 VALUES(until), {{locks}}.until)",
        kept("block"),
        kept("label"),
        kept("since"),
        kept("claim"),
    )
});

/// Grants the key like [`ACQUIRE`], if there is a row that nobody holds: for less than half of the server's time, as it neither reads what is there
/// beforehand nor tries to insert. For those who guess so: otherwise it may wait for a row that is locked, and the *last insert id* is zero.
///
/// The row's own token covers all of the key's that came before: a row is made above those of deleted ones. It stands first, because assignments
/// see what was assigned before.
///
/// block, label, claim, lease, id
const TAKE_AGAIN: &str = "\
    UPDATE {locks} SET \
        token = LAST_INSERT_ID(GREATEST({now}, token + block)), \
        block = ?, label = ?, since = {now}, claim = ?, until = {now} + ? \
    WHERE id = ? AND (claim IS NULL OR until <= {now}) AND {writable}";

/// id
const LOOK: &str = "\
    SELECT lock_key, claim, token, label, {now} - since, until - {now} \
    FROM {locks} \
    WHERE id = ? AND claim IS NOT NULL AND until > {now}";

/// Who holds one key or those of a namespace, by a lease, or by a connection that has the row locked and has said so; see [`row_name`].
///
/// id or namespace
fn holders(who: &str, holding: &str) -> String {
    format!(
        "SELECT lock_key, token, label, {{now}} - since, IF(until > {{now}}, until - {{now}}, NULL) \
         FROM {{locks}} \
         WHERE {who} AND claim IS NOT NULL AND (until > {{now}} OR {holding} IS NOT NULL)"
    )
}

/// The claim that is noted in the row, and the number of the connection that has the row locked for it.
///
/// id
const HOLDING: &str =
    "SELECT claim, CAST({holding} AS SIGNED) FROM {locks} WHERE id = ? AND claim IS NOT NULL";

/// Which connection has the row locked for its claim, if any.
const HOLDING_CONNECTION: &str = "IS_USED_LOCK(CONCAT('lock_registry_row_', LOWER(HEX(claim))))";

/// What a connection says with which a row is locked for this claim: it has a named lock of this name, which is nobody else's.
pub(super) fn row_name(claim: ClaimId) -> String {
    format!("lock_registry_row_{claim}")
}

/// Prolongs the grants that are still alive.
///
/// A row that somebody else has locked, for a fence perhaps, is passed over, so that it does not hold up the others. The limit keeps the inner
/// select from being merged into the update, which could not pass over anything. Which tables and which index are read first is not left to the
/// server: in a small table it prefers to read all rows, and locks what it reads.
///
/// A claim's id is random and belongs to one key, so the two lists need not be lists of pairs.
///
/// ids, claims, limit, lease
const RENEW: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id IN ({items}) AND claim IN ({items}) AND until > {now} AND {writable} \
        LIMIT ? FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.until = GREATEST(l.until, {now} + ?)";

/// Those of the claims that hold something, with the time that they have left.
///
/// ids
const LASTING: &str = "\
    SELECT claim, until - {now} FROM {locks} \
    WHERE id IN ({items}) AND claim IS NOT NULL AND until > {now}";

/// Those of the keys that are held, with the token of the grant.
///
/// ids
const HELD: &str = "\
    SELECT id, token FROM {locks} WHERE id IN ({items}) AND claim IS NOT NULL AND until > {now}";

/// Ends the grant of one claim. The row stays, for its tokens.
///
/// An ended grant is left as it is: it is as free as it can be, and the caller is told that it held nothing. Rows that were found are counted,
/// and the old `until` is in the future, so this changes what it finds.
///
/// Unused tokens of the block are reserved again, so that tokens do not outrun the clock.
///
/// tokens used, id, claim
const RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now}, block = LEAST(block, ?) \
    WHERE id = ? AND claim = ? AND until > {now}";

/// Ends the grant of whoever holds the key.
///
/// id
const FORCE_RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now} WHERE id = ? AND claim IS NOT NULL AND until > {now}";

/// Finds the grant as it was made, and keeps its row as it is until the caller's transaction ends. Tells whether that is also what the transaction reads, or whether
/// it goes on reading what was there before: the inner select is one that locks nothing. It depends on the outer one, so that it does not make the transaction begin to read while that waits.
///
/// id, claim, token, token
const FENCE: &str = "\
    SELECT {is_seen} FROM {locks} AS l \
    WHERE l.id = ? AND l.claim = ? AND l.token <= ? AND ? < l.token + l.block AND l.until > {now} FOR UPDATE";

/// Whether what a locking select has found as `l` is seen by one that locks nothing.
const IS_SEEN: &str = "\
    CAST(EXISTS (SELECT 1 FROM {locks} AS seen WHERE seen.id = l.id AND seen.claim = l.claim AND seen.token = l.token) AS SIGNED)";

/// Whether nobody holds a lease on the key, and whether the row still names the last holder; nothing if there is no row.
///
/// id
const IS_FREE: &str = "\
    SELECT CAST(claim IS NULL OR until <= {now} AS SIGNED), CAST(claim IS NOT NULL AS SIGNED) \
    FROM {locks} WHERE id = ?";

/// Takes a holder's claim out of the row if it has ended without a trace: by its lease, or with a connection. So the row changes after all that such a
/// holder wrote. Waits for nobody who has locked the row. How it is found is as in [`RENEW`].
///
/// id
const CLEAR_ENDED: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id = ? AND claim IS NOT NULL AND until <= {now} AND {writable} \
        LIMIT 1 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.claim = NULL";

/// Makes a row that nobody holds, unless there is one.
///
/// id, namespace, key
const MAKE_ROW: &str = "\
    INSERT IGNORE INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT ?, ?, ?, NULL, GREATEST(clock.now, clock.floor + 1), 1, NULL, clock.now, clock.now \
    FROM (SELECT {now} AS now, floor FROM {meta} WHERE id = 1) AS clock";

/// Locks the row if nobody else has, and tells whether there is a lease on it, the next token, and the newest grant.
///
/// id
const LOCK_ROW: &str = "\
    SELECT CAST(claim IS NOT NULL AND until > {now} AS SIGNED), CAST(GREATEST({now}, token + block) AS SIGNED), claim, token \
    FROM {locks} WHERE id = ? FOR UPDATE SKIP LOCKED";

/// Whether a transaction that has the row locked also reads it as it is, or goes on reading what was there before; and which tables these are. A statement of its own: one that
/// locked the row with the same breath would begin to read even if the row is not to be had.
///
/// id, claim, token
const ROW_SEEN_IN: &str = "\
    SELECT store, CAST(EXISTS (SELECT 1 FROM {locks} WHERE id = ? AND claim <=> ? AND token = ?) AS SIGNED) FROM {meta} WHERE id = 1";

/// Writes the token of a grant that is as long as the transaction; for others, there is a free row behind it.
///
/// token, id
const RAISE_TOKEN: &str = "\
    UPDATE {locks} SET claim = NULL, token = ?, block = 1, label = NULL, since = {now}, until = {now} WHERE id = ?";

/// Takes a named lock for the session, and looks whether a claim of this session is still noted in the row, and what time it is, if the server means to
/// be written to. Changes nothing.
///
/// The row is looked for when the lock has been asked for and not before, because what is looked for depends on the answer; what a statement of its own reads first decides what
/// it sees. So it sees all that was done by those who had the lock before. The limit is for servers that could make a join of it.
///
/// id, claim, name, seconds
const SESSION_LOOK: &str = "\
    SELECT CONNECTION_ID(), tried.got, \
        (SELECT {now} FROM {locks} AS l \
        WHERE l.id = IF(tried.got = 1, CAST(? AS BINARY(32)), NULL) AND l.claim = ? AND {writable} LIMIT 1) \
    FROM (SELECT CAST(GET_LOCK(?, ?) AS SIGNED) AS got) AS tried";

/// Whether nobody has the named lock, nor a lease on the row.
///
/// name, id
const SESSION_IS_FREE: &str = "\
    SELECT CAST(IS_FREE_LOCK(?) AND NOT EXISTS ( \
        SELECT 1 FROM {locks} WHERE id = ? AND claim IS NOT NULL AND until > {now}) AS SIGNED)";

/// Notes a claim whose token was reserved by an earlier claim of the session that has the lock.
///
/// claim, token, block, id, noted, token, token
const SESSION_MARK: &str = "\
    UPDATE {locks} SET claim = ?, token = ?, block = ? \
    WHERE id = ? AND claim = ? AND token <= ? AND ? < token + block";

/// Has the row there with what was noted in it by the session that has the lock: rows without a lease are purged after a while. One that is there
/// is left as it is, and waits for nobody who has locked it for a fence.
///
/// id, namespace, key, claim, token, block
const SESSION_KEEP: &str = "\
    INSERT IGNORE INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT ?, ?, ?, ?, ?, ?, NULL, {now}, 0 FROM DUAL";

/// Like [`FENCE`], for a lock that ends with a connection: whoever comes next changes the row first, whatever became of the connection. Shared,
/// with that connection perhaps.
///
/// id, claim, token, token
const FENCE_HELD: &str = "\
    SELECT {is_seen} FROM {locks} AS l \
    WHERE l.id = ? AND l.claim = ? AND l.token <= ? AND ? < l.token + l.block LOCK IN SHARE MODE";

/// Notes a claim and a larger token in the row, unless somebody holds a lease on it or a transaction has locked it; whether it did, the *last
/// insert id* tells. Waits for nobody. What is left is a free row, for those who want a lease. How the row is found is as in [`RENEW`].
///
/// id, claim, block, label
const ROW_NOTE: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id = ? AND (claim IS NULL OR until <= {now}) AND {writable} \
        LIMIT 1 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.token = LAST_INSERT_ID(GREATEST({now}, l.token + l.block)), l.claim = ?, l.block = ?, l.label = ?, \
        l.since = {now}, l.until = 0";

/// Locks the row for a transaction, if the claim is noted in it.
///
/// Shared, which keeps out whoever would note a claim, lock it for a transaction or take a lease, and leaves room for a fence of the holder's.
///
/// id, claim
const ROW_LOCK: &str = "\
    SELECT CONNECTION_ID() FROM {locks} WHERE id = ? AND claim = ? LOCK IN SHARE MODE";

/// How long somebody's lease on the key still lasts, if there is one; nothing if there is no row.
///
/// id
const ROW_SEEN: &str = "\
    SELECT IF(claim IS NOT NULL AND until > {now}, until - {now}, NULL) FROM {locks} WHERE id = ?";

/// The dead rows of a piece, with the largest of their tokens. A piece follows a place that is chosen at random: ids are hashes, so all
/// rows are found equally often.
///
/// place, rows, microseconds that a row must have been dead for
const PIECE: &str = "\
    SELECT piece.id, piece.token + piece.block - 1 \
    FROM (SELECT id, token, block, GREATEST(since, until) AS until FROM {locks} WHERE id >= ? ORDER BY id LIMIT ?) AS piece \
    WHERE piece.until <= {now} - ?";

/// Remembers the largest token of rows that will be deleted. Before they are: in between, a token is covered twice.
///
/// token, token
const RAISE_FLOOR: &str = "UPDATE {meta} SET floor = ? WHERE id = 1 AND floor < ?";

/// Deletes dead rows whose tokens are covered by the floor. Asks each row again, as it may have come alive since it was found.
///
/// ids, microseconds that a row must have been dead for, token
const PURGE: &str = "\
    DELETE l FROM {locks} AS l FORCE INDEX (PRIMARY) \
    WHERE l.id IN ({items}) AND GREATEST(l.since, l.until) <= {now} - ? AND l.token + l.block - 1 <= ?";
