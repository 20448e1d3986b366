//! `lockreg schema`: prints the SQL that creates the tables of a store. Administrators use it to
//! create the tables manually.

use serde_json::json;

use crate::args;
use crate::exit::CliError;
use crate::output::Output;

/// `lockreg schema`.
pub(crate) fn schema(schema: &args::SchemaArgs, output: Output) -> Result<u8, CliError> {
    let Some((dialect, sql)) = DIALECTS.iter().find(|(dialect, _)| *dialect == schema.dialect)
    else {
        let dialect = &schema.dialect;
        if ALL_DIALECTS.contains(&dialect.as_str()) {
            return Err(CliError::usage(format!(
                "this lockreg was built without {dialect} stores; run `cargo install registry-cli --features {dialect}`"
            )));
        }
        let known: Vec<&str> = DIALECTS.iter().map(|(dialect, _)| *dialect).collect();
        // The error does not show the argument, which may be a URL with a password.
        return Err(CliError::usage(format!(
            "unknown schema dialect; known dialects: {}",
            known.join(", ")
        )));
    };
    output.result(&json!({ "dialect": dialect, "sql": sql }), || (*sql).to_owned())?;
    Ok(0)
}

/// The dialects of a build with all features.
const ALL_DIALECTS: [&str; 3] = ["mysql", "postgres", "sqlite"];

const DIALECTS: &[(&str, &str)] = &[
    #[cfg(feature = "mysql")]
    ("mysql", registry_jdbc::MySqlBackend::schema()),
    #[cfg(feature = "postgres")]
    ("postgres", registry_jdbc::PostgresBackend::schema()),
    #[cfg(feature = "sqlite")]
    ("sqlite", registry_jdbc::SqliteBackend::schema()),
];
