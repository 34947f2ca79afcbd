//! What a metric is, and the macro that makes everything else from the table of metrics.
//!
//! An entry of the table (in `table.rs`) reads
//!
//! ```text
//! [host <- domain <- client] {
//!     /// Pages that were given back as zero pages.
//!     Gauge pages_zero: u64 [Pages, "ZERO" 5, "given back as zeros"];
//! }
//! ```
//!
//! Behind the unit stand title, width and meaning of its column, if screens have one. The name
//! gives the rest: field, key in JSON and CSV, sample in OpenMetrics, words on screens.
//!
//! The first brackets name the scopes that have the metric. `host <- domain` says that the host's
//! value is the sum over its domains; scopes without an arrow between them have values of their
//! own. From the table come, for each scope, a struct with serde's traits whose fields are its
//! metrics and a method that visits them; for each arrow an `AddAssign`; and the list of all
//! metrics.

use std::fmt;

/// How a metric behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows while the daemon runs.
    Counter,
    /// May grow and shrink.
    Gauge,
}

/// What a metric counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Microseconds.
    Microseconds,
    /// Bytes.
    Bytes,
    /// Pages of 4096 bytes.
    Pages,
    /// Pages a second.
    PagesPerSecond,
    /// Bytes a second.
    BytesPerSecond,
    /// Percent of one CPU.
    Percent,
    /// A part of the whole, from 0 to 1.
    Ratio,
    /// A number of things that the name says.
    Count,
    /// Yes (1) or no (0).
    Bool,
}

/// What a metric describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The daemon, with all that it manages on its host.
    Host,
    /// The daemon's governor: `governor` in the JSON object.
    Governor,
    /// One domain: an element of `domains`.
    Domain,
    /// One client: an element of its domain's `clients`.
    Client,
    /// What a client's recycler does: `recycling` in the client, if its guest marks free pages.
    Recycler,
}

impl Scope {
    /// All scopes, from the whole to its parts.
    pub const ALL: [Scope; 5] = [Scope::Host, Scope::Governor, Scope::Domain, Scope::Client, Scope::Recycler];
}

/// The definition of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, which is its key in the JSON object.
    pub name: &'static str,
    /// How it behaves over time.
    pub kind: Kind,
    /// What it counts.
    pub unit: Unit,
    /// The title of its column, made of words of its stem; empty: screens have no column of it.
    pub title: &'static str,
    /// The width of that column, in characters.
    pub width: usize,
    /// What the column shows, in a few words.
    pub brief: &'static str,
    /// Its meaning; one space stands before each line of the source.
    pub(crate) text: &'static str,
    /// Whether a scope has it, in the order of [`Scope::ALL`].
    pub(crate) scopes: [bool; 5],
    /// Whether a scope's value is the sum over its parts, in the order of [`Scope::ALL`].
    pub(crate) summed: [bool; 5],
}

impl Metric {
    /// Its name without its unit, and without `pages` where it counts those in a state.
    pub fn stem(&self) -> &'static str {
        let ends = ["_total", "_us", "_percent", "_ratio", "_bytes", "_pages_per_second", "_per_second", "_seconds"];
        let stem = ends.iter().fold(self.name, |name, end| name.strip_suffix(end).unwrap_or(name));
        stem.strip_prefix("pages_").unwrap_or(stem)
    }

    /// Its stem as words.
    pub fn words(&self) -> String {
        self.stem().replace('_', " ")
    }

    /// The unit in which a counter's growth in a second is told. `None`: it is no counter.
    pub fn rate(&self) -> Option<Unit> {
        match (self.kind, self.unit) {
            (Kind::Gauge, _) => None,
            (_, Unit::Seconds) => Some(Unit::Ratio),
            (_, unit) => Some(unit),
        }
    }

    /// Its title where growth stands in the column.
    pub fn heading(&self) -> String {
        let end = match (self.rate(), self.unit) {
            (Some(Unit::Ratio), _) | (_, Unit::Percent | Unit::Ratio) => "%",
            (Some(_), _) | (_, Unit::PagesPerSecond | Unit::BytesPerSecond) => "/s",
            _ => "",
        };
        format!("{}{end}", self.title)
    }

    /// Its meaning, in a sentence or two.
    pub fn help(&self) -> &'static str {
        self.text.trim_start()
    }

    /// Whether this scope has the metric.
    pub fn is_in(&self, scope: Scope) -> bool {
        self.scopes[scope as usize]
    }

    /// Whether this scope's value is the sum over its parts.
    pub fn is_sum_in(&self, scope: Scope) -> bool {
        self.summed[scope as usize]
    }
}

/// A metric's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A whole number that is at least 0.
    Unsigned(u64),
    /// A whole number.
    Signed(i64),
    /// A real number.
    Real(f64),
}

impl Value {
    /// As a real number.
    pub fn real(self) -> f64 {
        match self {
            Value::Unsigned(value) => value as f64,
            Value::Signed(value) => value as f64,
            Value::Real(value) => value,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(value) => value.fmt(f),
            Value::Signed(value) => value.fmt(f),
            Value::Real(value) => value.fmt(f),
        }
    }
}

/// A field's type, which may lack a value at times.
pub(crate) trait Reading {
    /// The value now, if there is one.
    fn reading(&self) -> Option<Value>;
}

macro_rules! reading {
    ($($ty:ty => $value:ident as $as:ty),+) => {$(
        impl Reading for $ty {
            fn reading(&self) -> Option<Value> {
                Some(Value::$value(*self as $as))
            }
        }
    )+};
}

reading!(u64 => Unsigned as u64, u32 => Unsigned as u64, usize => Unsigned as u64, bool => Unsigned as u64,
    i64 => Signed as i64, f64 => Real as f64);

impl<T: Reading> Reading for Option<T> {
    fn reading(&self) -> Option<Value> {
        self.as_ref().and_then(T::reading)
    }
}

/// Gives the first block if the scope is in the list in brackets, else the second.
macro_rules! if_in {
    ($scope:ident [] $then:block $else:block) => { $else };
    (host [host $($rest:tt)*] $then:block $else:block) => { $then };
    (governor [governor $($rest:tt)*] $then:block $else:block) => { $then };
    (domain [domain $($rest:tt)*] $then:block $else:block) => { $then };
    (client [client $($rest:tt)*] $then:block $else:block) => { $then };
    (recycler [recycler $($rest:tt)*] $then:block $else:block) => { $then };
    ($scope:ident [$skip:tt $($rest:tt)*] $then:block $else:block) => {
        if_in!($scope [$($rest)*] $then $else)
    };
}

/// Gives the first block if `$sum <- $part` is in the list in brackets, else the second.
macro_rules! if_sum {
    ($sum:ident $part:ident [] $then:block $else:block) => { $else };
    (host domain [host <- domain $($rest:tt)*] $then:block $else:block) => { $then };
    (host client [host <- client $($rest:tt)*] $then:block $else:block) => { $then };
    (host recycler [host <- recycler $($rest:tt)*] $then:block $else:block) => { $then };
    (domain client [domain <- client $($rest:tt)*] $then:block $else:block) => { $then };
    ($sum:ident $part:ident [$skip:tt $($rest:tt)*] $then:block $else:block) => {
        if_sum!($sum $part [$($rest)*] $then $else)
    };
}

/// See the module's text.
macro_rules! metrics {
    ($($scopes:tt { $( $(#[doc = $help:literal])+ $kind:ident $name:ident : $ty:ty [$($unit:tt)+]; )+ })+) => {
        metrics!(@structs {} {} {} {} {} $( $scopes { $( $(#[doc = $help])+ pub $name: $ty, )+ } )+);

        /// Every metric, in the order of the table.
        pub static METRICS: &[Metric] = &[$($( metrics!(@metric $scopes $name $kind [$($unit)+] $($help)+) ),+),+];

        metrics!(@visit host HostMetrics $($scopes {$( $name $kind [$($unit)+] { $($help)+ } )+})+);
        metrics!(@visit governor GovernorMetrics $($scopes {$( $name $kind [$($unit)+] { $($help)+ } )+})+);
        metrics!(@visit domain DomainMetrics $($scopes {$( $name $kind [$($unit)+] { $($help)+ } )+})+);
        metrics!(@visit client ClientMetrics $($scopes {$( $name $kind [$($unit)+] { $($help)+ } )+})+);
        metrics!(@visit recycler RecyclerMetrics $($scopes {$( $name $kind [$($unit)+] { $($help)+ } )+})+);

        metrics!(@sum host domain HostMetrics DomainMetrics $($scopes {$($name)+})+);
        metrics!(@sum host client HostMetrics ClientMetrics $($scopes {$($name)+})+);
        metrics!(@sum host recycler HostMetrics RecyclerMetrics $($scopes {$($name)+})+);
        metrics!(@sum domain client DomainMetrics ClientMetrics $($scopes {$($name)+})+);
    };

    // Sorts the fields by scope: one scope of the first list at a time.
    (@structs {$($host:tt)*} {$($governor:tt)*} {$($domain:tt)*} {$($client:tt)*} {$($recycler:tt)*}) => {
        metrics!(@struct HostMetrics "the daemon and its host" $($host)*);
        metrics!(@struct GovernorMetrics "the governor" $($governor)*);
        metrics!(@struct DomainMetrics "a domain" $($domain)*);
        metrics!(@struct ClientMetrics "a client" $($client)*);
        metrics!(@struct RecyclerMetrics "a client's recycler" $($recycler)*);
    };
    (@structs $h:tt $g:tt $d:tt $c:tt $r:tt [] $fields:tt $($rest:tt)*) => {
        metrics!(@structs $h $g $d $c $r $($rest)*);
    };
    (@structs $h:tt $g:tt $d:tt $c:tt $r:tt [<- $($scopes:tt)*] $fields:tt $($rest:tt)*) => {
        metrics!(@structs $h $g $d $c $r [$($scopes)*] $fields $($rest)*);
    };
    (@structs {$($h:tt)*} $g:tt $d:tt $c:tt $r:tt [host $($scopes:tt)*] {$($field:tt)*} $($rest:tt)*) => {
        metrics!(@structs {$($h)* $($field)*} $g $d $c $r [$($scopes)*] {$($field)*} $($rest)*);
    };
    (@structs $h:tt {$($g:tt)*} $d:tt $c:tt $r:tt [governor $($scopes:tt)*] {$($field:tt)*} $($rest:tt)*) => {
        metrics!(@structs $h {$($g)* $($field)*} $d $c $r [$($scopes)*] {$($field)*} $($rest)*);
    };
    (@structs $h:tt $g:tt {$($d:tt)*} $c:tt $r:tt [domain $($scopes:tt)*] {$($field:tt)*} $($rest:tt)*) => {
        metrics!(@structs $h $g {$($d)* $($field)*} $c $r [$($scopes)*] {$($field)*} $($rest)*);
    };
    (@structs $h:tt $g:tt $d:tt {$($c:tt)*} $r:tt [client $($scopes:tt)*] {$($field:tt)*} $($rest:tt)*) => {
        metrics!(@structs $h $g $d {$($c)* $($field)*} $r [$($scopes)*] {$($field)*} $($rest)*);
    };
    (@structs $h:tt $g:tt $d:tt $c:tt {$($r:tt)*} [recycler $($scopes:tt)*] {$($field:tt)*} $($rest:tt)*) => {
        metrics!(@structs $h $g $d $c {$($r)* $($field)*} [$($scopes)*] {$($field)*} $($rest)*);
    };
    (@struct $struct:ident $of:literal $($fields:tt)*) => {
        #[doc = concat!("The metrics of ", $of, ".")]
        ///
        /// A metric that a daemon of another build does not tell is 0, or has no value.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $struct { $($fields)* }
    };

    (@metric $scopes:tt $name:ident $kind:ident [$unit:ident $(, $title:literal $width:literal, $brief:literal)?] $($help:literal)+) => {
        Metric {
            name: stringify!($name),
            kind: Kind::$kind,
            unit: Unit::$unit,
            title: concat!("" $(, $title)?),
            width: 0 $(+ $width)?,
            brief: concat!("" $(, $brief)?),
            text: concat!($($help),+),
            scopes: [
                if_in!(host $scopes { true } { false }),
                if_in!(governor $scopes { true } { false }),
                if_in!(domain $scopes { true } { false }),
                if_in!(client $scopes { true } { false }),
                if_in!(recycler $scopes { true } { false }),
            ],
            summed: [
                if_sum!(host domain $scopes { true } { false })
                    || if_sum!(host client $scopes { true } { false })
                    || if_sum!(host recycler $scopes { true } { false }),
                false,
                if_sum!(domain client $scopes { true } { false }),
                false,
                false,
            ],
        }
    };

    (@visit $scope:ident $struct:ident $($scopes:tt {$( $name:ident $kind:ident $unit:tt { $($help:literal)+ } )+})+) => {
        impl $struct {
            /// Calls `visit` with each metric and its value, in the order of the table. A metric
            /// that has no value at present is left out.
            pub fn for_each_metric(&self, visit: &mut dyn FnMut(&'static Metric, Value)) {
                $($( if_in!($scope $scopes {
                    const METRIC: Metric = metrics!(@metric $scopes $name $kind $unit $($help)+);
                    if let Some(value) = self.$name.reading() {
                        visit(&METRIC, value);
                    }
                } {}); )+)+
            }

            /// The value of a metric, if this scope has it and it has one at present.
            pub fn value(&self, metric: &Metric) -> Option<Value> {
                let mut found = None;
                self.for_each_metric(&mut |other, value| {
                    if other.name == metric.name {
                        found = Some(value);
                    }
                });
                found
            }
        }
    };

    (@sum $sum:ident $part:ident $sums:ident $parts:ident $($scopes:tt {$($name:ident)+})+) => {
        impl std::ops::AddAssign<&$parts> for $sums {
            /// Adds the metrics of which the table says that this scope's are sums over those.
            fn add_assign(&mut self, part: &$parts) {
                $($( if_sum!($sum $part $scopes { self.$name += part.$name; } {}); )+)+
            }
        }
    };
}

pub(crate) use {if_in, if_sum, metrics};
