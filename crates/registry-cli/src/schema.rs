//! `lockreg schema`: the SQL that makes the tables of a store, for those who make tables themselves.

use serde_json::json;

use crate::args;
use crate::exit::Failure;
use crate::say::Say;

/// `lockreg schema`.
pub(crate) fn schema(schema: &args::Schema, say: Say) -> Result<u8, Failure> {
    let Some((dialect, sql)) = DIALECTS.iter().find(|(dialect, _)| *dialect == schema.dialect)
    else {
        let known: Vec<&str> = DIALECTS.iter().map(|(dialect, _)| *dialect).collect();
        return Err(Failure::usage(format!(
            "there is no schema of that name; there is one for: {}",
            known.join(", ")
        )));
    };
    say.result(&json!({ "dialect": dialect, "sql": sql }), || (*sql).to_owned())?;
    Ok(0)
}

const DIALECTS: &[(&str, &str)] = &[
    #[cfg(feature = "mysql")]
    ("mysql", registry_jdbc::MySqlBackend::schema()),
    #[cfg(feature = "postgres")]
    ("postgres", registry_jdbc::PostgresBackend::schema()),
    #[cfg(feature = "sqlite")]
    ("sqlite", registry_jdbc::SqliteBackend::schema()),
];
