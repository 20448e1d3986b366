//! The query plans of the statements. A plan that scans the table is correct but too slow.

use sqlx::{ConnectOptions, Row, SqliteConnection};

use super::TestFolder;
use crate::sqlite::{connection, sql};

async fn plan(connection: &mut SqliteConnection, statement: &str) -> Vec<String> {
    let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"));
    let rows = sqlx::query(explain).fetch_all(connection).await.unwrap();
    rows.iter().map(|row| row.get::<String, _>("detail")).collect()
}

#[tokio::test]
async fn no_statement_of_an_acquisition_scans_the_table() {
    let folder = TestFolder::new();
    let _tables = folder.process().await;
    let mut connection = connection::options(&folder.file()).connect().await.unwrap();
    let renew = sql::RENEW.iter().chain(sql::RENEW_RETURNING.iter()).map(|size| size.text.as_str());
    let held = sql::HELD_TOKENS.iter().map(|size| size.text.as_str());
    let fixed = [
        sql::ACQUIRE_AT,
        sql::ACQUIRE_ABOVE,
        sql::CURRENT_GRANT,
        sql::RELEASE,
        sql::FORCE_RELEASE,
        sql::FENCE,
        sql::PURGE_CANDIDATES,
        sql::PURGE,
    ];
    let by_key = ["(namespace=? AND key=?)", "(namespace,key)>(?,?)"];
    for statement in renew.chain(held).chain(fixed) {
        for step in plan(&mut connection, statement).await {
            let touches_locks = step.contains("lock_registry_locks") || step.contains(" l ");
            let finds_by_key = by_key.iter().any(|index| step.contains(index));
            assert!(!touches_locks || finds_by_key, "{step}\n{statement}");
            assert!(!step.contains("TEMP B-TREE"), "{step}\n{statement}");
        }
    }
}
