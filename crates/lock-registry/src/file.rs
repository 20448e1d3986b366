//! Options from TOML, or from a section of an application's own configuration file. Feature
//! `config`.
//!
//! Errors never contain the message of the TOML parser. That message could quote a URL with a
//! password.

use std::fmt;

use registry_core::ConfigError;
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::config::RegistryConfig;
use crate::options::{Options, Origin};

impl RegistryConfig {
    /// Adds the options of `text`, a TOML document. These options are weaker than code, command
    /// line and environment, and stronger than the query of the store URL.
    ///
    /// The options are at the top level or in a table `[lock-registry]`. If this table exists, the
    /// rest of the document is ignored.
    ///
    /// # Errors
    /// [`ConfigError`] if the text is not TOML, if `lock-registry` is not a table, or if an option
    /// is unknown, was already set by a file, or has a value with invalid syntax.
    /// [`check`](Self::check) also verifies the range.
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let config = RegistryConfig::new().with_toml(r#"
    ///     [lock-registry]
    ///     url = "memory:"
    ///     lease = "10s"
    ///     renew = false
    /// "#)?;
    /// # config.check()?;
    /// assert!(RegistryConfig::new().with_toml("leese = '10s'").is_err());
    /// # Ok::<(), lock_registry::ConfigError>(())
    /// ```
    pub fn with_toml(mut self, text: &str) -> Result<Self, ConfigError> {
        let mut table: toml::Table =
            toml::from_str(text).map_err(|error| invalid_toml(text, &error))?;
        if let Some(section) = table.remove(SECTION) {
            let toml::Value::Table(section) = section else {
                return Err(ConfigError::Invalid(format!(
                    "`{SECTION}` in {} must be a table; write `[{SECTION}]`",
                    Origin::File
                )));
            };
            table = section;
        }
        for (name, value) in table {
            let value = match value {
                toml::Value::String(text) => OptionValue::Text(text),
                toml::Value::Boolean(on) => OptionValue::Text(on.to_string()),
                toml::Value::Integer(number) => OptionValue::Text(number.to_string()),
                _ => OptionValue::Other,
            };
            value.set_in(self.options_mut(Origin::File), &name)?;
        }
        Ok(self)
    }
}

const SECTION: &str = "lock-registry";

fn invalid_toml(text: &str, error: &toml::de::Error) -> ConfigError {
    let line = error
        .span()
        .map_or(1, |span| text.bytes().take(span.start).filter(|byte| *byte == b'\n').count() + 1);
    ConfigError::Invalid(format!(
        "{} is not valid TOML at line {line}; correct the syntax there",
        Origin::File
    ))
}

/// The value of an option.
enum OptionValue {
    /// Text. A whole number or a boolean is converted to text, the only type of the other sources.
    Text(String),
    /// A list, a table, a date, a null or a number that is not whole. No option accepts these.
    Other,
}

impl OptionValue {
    fn set_in(self, options: &mut Options, name: &str) -> Result<(), ConfigError> {
        match self {
            Self::Text(text) => options.set(Origin::File, name, &text),
            Self::Other => {
                // If the name is unknown too, the error about the name is more helpful.
                options.clone().set(Origin::File, name, "")
                    .err()
                    .filter(|error| matches!(error, ConfigError::Unknown { .. }))
                    .map_or_else(
                        || Err(ConfigError::Invalid(format!(
                            "option {name:?} in {} must be text, a whole number, `true` or `false`; write one of these",
                            Origin::File
                        ))),
                        Err,
                    )
            }
        }
    }
}

/// Deserializes a section of a larger configuration, in any self-describing format.
///
/// Deserialization accepts unknown names and invalid values. [`RegistryConfig::check`] and
/// [`RegistryConfig::connect`] then return the error. A deserializer's own error would quote the
/// surrounding text, which may contain a password.
impl<'de> Deserialize<'de> for RegistryConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SectionVisitor)
    }
}

struct SectionVisitor;

impl<'de> Visitor<'de> for SectionVisitor {
    type Value = RegistryConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of lock registry options")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RegistryConfig, A::Error> {
        let mut config = RegistryConfig::new();
        while let Some((name, value)) = map.next_entry::<String, OptionValue>()? {
            if let Err(error) = value.set_in(config.options_mut(Origin::File), &name) {
                config.deferred_error.get_or_insert(error);
            }
        }
        Ok(config)
    }

    fn visit_str<E>(self, _: &str) -> Result<RegistryConfig, E> {
        Ok(not_a_table())
    }

    fn visit_bool<E>(self, _: bool) -> Result<RegistryConfig, E> {
        Ok(not_a_table())
    }

    fn visit_i64<E>(self, _: i64) -> Result<RegistryConfig, E> {
        Ok(not_a_table())
    }

    fn visit_u64<E>(self, _: u64) -> Result<RegistryConfig, E> {
        Ok(not_a_table())
    }

    fn visit_f64<E>(self, _: f64) -> Result<RegistryConfig, E> {
        Ok(not_a_table())
    }

    /// An empty section of YAML.
    fn visit_unit<E>(self) -> Result<RegistryConfig, E> {
        Ok(RegistryConfig::new())
    }

    fn visit_none<E>(self) -> Result<RegistryConfig, E> {
        Ok(RegistryConfig::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<RegistryConfig, A::Error> {
        while elements.next_element::<IgnoredAny>()?.is_some() {}
        Ok(not_a_table())
    }
}

/// Returns the configuration of a section that is a single value or a list.
fn not_a_table() -> RegistryConfig {
    let mut config = RegistryConfig::new();
    config.deferred_error = Some(ConfigError::Invalid(
        "the section of the lock registry must be a table of options; write for example `url = '..'`"
            .to_owned(),
    ));
    config
}

impl<'de> Deserialize<'de> for OptionValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OptionValueVisitor)
    }
}

struct OptionValueVisitor;

impl<'de> Visitor<'de> for OptionValueVisitor {
    type Value = OptionValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the value of an option")
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(on.to_string()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(number.to_string()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(number.to_string()))
    }

    fn visit_f64<E: de::Error>(self, _number: f64) -> Result<OptionValue, E> {
        Ok(OptionValue::Other)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(text.to_owned()))
    }

    fn visit_i128<E: de::Error>(self, number: i128) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(number.to_string()))
    }

    fn visit_u128<E: de::Error>(self, number: u128) -> Result<OptionValue, E> {
        Ok(OptionValue::Text(number.to_string()))
    }

    fn visit_bytes<E: de::Error>(self, _bytes: &[u8]) -> Result<OptionValue, E> {
        Ok(OptionValue::Other)
    }

    fn visit_unit<E: de::Error>(self) -> Result<OptionValue, E> {
        Ok(OptionValue::Other)
    }

    fn visit_none<E: de::Error>(self) -> Result<OptionValue, E> {
        Ok(OptionValue::Other)
    }

    fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<OptionValue, D::Error> {
        value.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OptionValue, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(OptionValue::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OptionValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(OptionValue::Other)
    }
}
