//! The macro that makes the configuration from one table of settings, and what a setting is.
//!
//! An entry of the table (in `config.rs`) reads
//!
//! ```text
//! /// Time between two scans of a client's memory.
//! merge_period: f64 = 20.0, "seconds", Between(0.05, 86_400.0), option "S";
//! ```
//!
//! It names the key, its type, default, unit and range; `option` gives it an option of `pageone
//! daemon` too, with the name of its value. A change takes [`Effect`] at once, where no `effect`
//! says otherwise. From the table come the struct with serde's traits, its defaults, the check of
//! ranges, what a reload may change, and the list of [`Setting`]s from which the program makes its
//! options, the sample file and the reference page.

/// A setting whose value is of no use.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{key}: {problem}")]
pub struct ConfigError {
    /// The setting's key.
    pub key: &'static str,
    /// What is wrong, and what would be right.
    pub problem: String,
}

/// One setting of a configuration.
#[derive(Debug)]
pub struct Setting<C> {
    /// Its key in the configuration file.
    pub key: &'static str,
    /// The unit of its value; empty if it has none.
    pub unit: &'static str,
    /// The values that it may have.
    pub range: Range,
    /// Its option of `pageone daemon`, if it has one.
    pub option: Option<CommandOption<C>>,
    /// When a change takes effect while the daemon runs.
    pub effect: Effect,
    /// Its meaning; one space stands before each line of the source.
    pub(super) text: &'static str,
}

impl<C> Setting<C> {
    /// Its meaning, in a sentence or two.
    pub fn help(&self) -> &'static str {
        self.text.trim_start()
    }
}

/// A setting's option of `pageone daemon`: its key, with hyphens.
#[derive(Debug)]
pub struct CommandOption<C> {
    /// Name of its value in the help.
    pub value_name: &'static str,
    /// Sets it from a command line's text.
    pub set: fn(&mut C, &str) -> Result<(), ConfigError>,
}

impl<C> Clone for CommandOption<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for CommandOption<C> {}

/// When a changed setting takes effect, after a running daemon has read its file again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// At once, or with the next merge period.
    AtOnce,
    /// For clients that come from then on; the others keep what they have.
    NewClients,
    /// When the daemon is started again.
    Restart,
}

/// Which settings another configuration changes, by their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Those in effect from now on.
    pub at_once: Vec<&'static str>,
    /// Those in effect for clients that come from now on.
    pub new_clients: Vec<&'static str>,
    /// Those that keep their old values until the daemon is started again.
    pub restart: Vec<&'static str>,
}

/// The values that a setting may have.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    /// All that its type has.
    Any,
    /// From the first to the second.
    Between(f64, f64),
    /// 0, for none; or from 0.1 to this.
    NoneOr(f64),
    /// At most this.
    AtMost(f64),
    /// 0, for as long as the merge period; or at most the merge period.
    MergePeriod,
    /// One of these words.
    OneOf(fn() -> Vec<&'static str>),
}

impl Range {
    /// Checks a value. Where the range depends on other settings, [`Config::check`] does.
    pub(super) fn check(self, key: &'static str, unit: &str, value: Option<f64>) -> Result<(), ConfigError> {
        let Some(value) = value else { return Ok(()) };
        let problem = match self {
            Range::Between(least, most) if !(least..=most).contains(&value) => {
                format!("{value} is not between {least} and {most} {unit}")
            }
            Range::NoneOr(most) if value != 0.0 && !(0.1..=most).contains(&value) => {
                format!("{value} is not 0, for none, or between 0.1 and {most} {unit}")
            }
            Range::AtMost(most) if value > most => format!("{value} is more than {most}"),
            _ => return Ok(()),
        };
        Err(ConfigError { key, problem })
    }
}

/// A setting's type, which may be a number.
pub(super) trait Number {
    fn number(&self) -> Option<f64> {
        None
    }
}

impl Number for f64 {
    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl Number for usize {
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Number for u64 {
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Number for bool {}
impl Number for governor::Mode {}
impl Number for wire::HugePages {}
impl<K, V> Number for std::collections::BTreeMap<K, V> {}
impl<T> Number for Vec<T> {}

/// See the module's text.
macro_rules! settings {
    ($( $(#[doc = $help:literal])+ $(#[serde($serde:meta)])? $key:ident: $ty:ty = $default:expr,
        $unit:literal, $range:ident $(($($bound:expr),+))? $(, option $value_name:literal)?
        $(, effect $effect:ident)?; )+) => {
        /// Settings of the engine. The names are the keys of the configuration file.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Config {
            $( $(#[doc = $help])+ $(#[serde($serde)])? pub $key: $ty, )+
            /// Directory of the sockets and the state file.
            #[serde(skip)]
            pub directory: PathBuf,
        }

        impl Default for Config {
            fn default() -> Self {
                Self { $( $key: $default, )+ directory: PathBuf::new() }
            }
        }

        /// Every setting, in the order of the table.
        pub static SETTINGS: &[Setting] = &[$( Setting {
            key: stringify!($key),
            unit: $unit,
            range: Range::$range $(($($bound),+))?,
            option: settings!(@option $key $($value_name)?),
            effect: settings!(@effect $($effect)?),
            text: concat!($($help),+),
        } ),+];

        impl Config {
            /// Checks each value by itself.
            ///
            /// # Errors
            ///
            /// The first setting that is out of its range.
            pub fn check_ranges(&self) -> Result<(), ConfigError> {
                $( (Range::$range $(($($bound),+))?).check(stringify!($key), $unit, self.$key.number())?; )+
                Ok(())
            }

            /// Compares with what is in effect. What takes effect at a restart only gets its value
            /// from there.
            pub(crate) fn keep_fixed(&mut self, running: &Config) -> Changes {
                let mut changes = Changes::default();
                $( if self.$key != running.$key {
                    match settings!(@effect $($effect)?) {
                        Effect::AtOnce => changes.at_once.push(stringify!($key)),
                        Effect::NewClients => changes.new_clients.push(stringify!($key)),
                        Effect::Restart => {
                            self.$key = running.$key.clone();
                            changes.restart.push(stringify!($key));
                        }
                    }
                } )+
                self.directory = running.directory.clone();
                changes
            }
        }
    };
    (@effect) => { Effect::AtOnce };
    (@effect $effect:ident) => { Effect::$effect };
    (@option $key:ident) => { None };
    (@option $key:ident $value_name:literal) => {
        Some(CommandOption {
            value_name: $value_name,
            set: |config, text| {
                let wrong = |problem| ConfigError { key: stringify!($key), problem };
                config.$key = text.parse().map_err(|e| wrong(format!("{e}")))?;
                Ok(())
            },
        })
    };
}

pub(super) use settings;
