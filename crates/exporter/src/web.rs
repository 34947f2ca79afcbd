//! The file of `--web.config.file`: TLS and passwords, in the format that Prometheus' exporters
//! have in common.
//!
//! A key that is not supported is refused by name. So what a file asks for is in effect, or the
//! exporter does not start.
//!
//! The file, and the files that it names, are read again when somebody connects, once a second at
//! most. If they cannot be used, what was read before stays in effect, and the log says why. So it
//! does if they would take TLS or the question who asks away: a file that is half written does.
//!
//! Source: exporter-toolkit, `docs/web-configuration.md`.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use claims::ClaimError;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::users::Users;

/// Bytes of a file at most.
const MOST: u64 = 1 << 20;
/// Time between two looks at the files.
const AGAIN: Duration = Duration::from_secs(1);
/// Fields that answers may have, in lower case as HTTP/2 has them.
const HEADERS: [&str; 5] = [
    "content-security-policy",
    "strict-transport-security",
    "x-content-type-options",
    "x-frame-options",
    "x-xss-protection",
];

/// Why the file of `--web.config.file` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// One of the files cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// It.
        path: PathBuf,
        /// Why.
        why: ClaimError,
    },
    /// A key is not known, or a value is none of its kind.
    #[error("{}: {why}; take out or correct what it names: docs/guide/monitoring.md has all that is supported", path.display())]
    Yaml {
        /// The file.
        path: PathBuf,
        /// What, and in which line.
        why: String,
    },
    /// A value cannot be used.
    #[error("{}: {key}: {why}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Whose value.
        key: &'static str,
        /// Why, and the remedy.
        why: String,
    },
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    tls_server_config: Option<Tls>,
    http_server_config: Http,
    basic_auth_users: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Tls {
    cert: Option<String>,
    cert_file: Option<PathBuf>,
    key: Option<String>,
    key_file: Option<PathBuf>,
    client_ca: Option<String>,
    client_ca_file: Option<PathBuf>,
    client_auth_type: ClientAuth,
    min_version: Option<Version>,
    max_version: Option<Version>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Http {
    http2: bool,
    headers: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum ClientAuth {
    #[default]
    NoClientCert,
    VerifyClientCertIfGiven,
    RequireAndVerifyClientCert,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum Version {
    TLS12,
    TLS13,
}

/// What the files say.
#[derive(Debug, Default)]
pub(crate) struct Web {
    /// `None`: no TLS.
    pub(crate) tls: Option<Arc<ServerConfig>>,
    pub(crate) users: Users,
    /// What each answer has besides.
    pub(crate) headers: HeaderMap,
    /// Whether it asks who somebody is: for a password, or for a certificate.
    asks_who: bool,
}

/// The files, which are looked at for changes.
#[derive(Debug)]
pub struct Watched {
    path: PathBuf,
    /// When they were looked at last.
    at: Instant,
    contents: Contents,
    web: Arc<Web>,
    /// What was wrong then.
    error: String,
}

/// The bytes of the file and of those that it names.
type Contents = Vec<(PathBuf, Vec<u8>)>;

impl Watched {
    /// Reads the file, and those that it names.
    ///
    /// # Errors
    ///
    /// [`WebError`].
    pub fn new(path: PathBuf) -> Result<Self, WebError> {
        let mut contents = Contents::new();
        let web = Arc::new(Web::read(&path, &mut contents)?);
        Ok(Self { path, at: Instant::now(), contents, web, error: String::new() })
    }

    /// Whether it asks who somebody is: for a password, or for a certificate.
    pub fn asks_who(&self) -> bool {
        self.web.asks_who
    }

    /// How an address begins.
    pub fn scheme(&self) -> &'static str {
        if self.web.tls.is_some() { "https" } else { "http" }
    }

    /// Files with secrets in them that every account can read.
    pub fn readable(&self) -> Vec<&Path> {
        let is_readable = |path: &&Path| path.metadata().is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0);
        let is_secret = |bytes: &[u8]| {
            let has = |word: &[u8]| bytes.windows(word.len()).any(|part| part == word);
            has(b"PRIVATE KEY") || has(b"basic_auth_users")
        };
        let secret = self.contents.iter().filter(|(_, bytes)| is_secret(bytes));
        secret.map(|(path, _)| path.as_path()).filter(is_readable).collect()
    }

    /// What they say now, or said when they could last be used.
    pub(crate) fn now(&mut self) -> Arc<Web> {
        if self.at.elapsed() >= AGAIN {
            self.at = Instant::now();
            let mut contents = Contents::new();
            let error = match Web::read(&self.path, &mut contents) {
                Ok(web) if self.web.asks_who && !web.asks_who || self.web.tls.is_some() && web.tls.is_none() => {
                    format!(
                        "{} takes TLS or passwords away; start the exporter again if that is right",
                        self.path.display()
                    )
                }
                Ok(web) => {
                    if contents != self.contents {
                        (self.contents, self.web) = (contents, Arc::new(web));
                        output::note!("{} was read again", self.path.display());
                    }
                    String::new()
                }
                Err(error) => error.to_string(),
            };
            if error != self.error && !error.is_empty() {
                output::note!("{error}; what was read before stays in effect");
            }
            self.error = error;
        }
        self.web.clone()
    }
}

impl Web {
    /// Reads all files; their bytes go to `contents`.
    fn read(path: &Path, contents: &mut Contents) -> Result<Self, WebError> {
        let wrong = |key, why: String| WebError::Key { path: path.into(), key, why };
        let read = |path: &Path| claims::read(path, MOST).map_err(|why| WebError::Read { path: path.into(), why });
        let bytes = read(path)?;
        let yaml = |error: serde_saphyr::Error| WebError::Yaml {
            path: path.into(),
            // Without the lines of the file: it has secrets.
            why: error.without_snippet().to_string(),
        };
        let file: File = serde_saphyr::from_slice(&bytes).map_err(yaml)?;
        contents.push((path.into(), bytes));
        if file.http_server_config.http2 {
            return Err(wrong("http2", "there is HTTP/1.1 alone; leave it out, or say false".into()));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in file.http_server_config.headers {
            let known = HEADERS.into_iter().find(|known| known.eq_ignore_ascii_case(&name));
            let value = HeaderValue::from_str(&value);
            let (Some(known), Ok(value)) = (known, value) else {
                return Err(wrong("headers", format!("{name} cannot be set so; these can: {}", HEADERS.join(", "))));
            };
            headers.insert(HeaderName::from_static(known), value);
        }
        let users = Users::new(file.basic_auth_users).map_err(|why| wrong("basic_auth_users", why))?;
        let Some(tls) = file.tls_server_config else {
            return Ok(Self { asks_who: !users.hashes.is_empty(), users, headers, tls: None });
        };
        // Of the two keys of a part of TLS, one has it, and the other the file that has it.
        let mut part = |key, inline: Option<String>, named: Option<PathBuf>| match (inline, named) {
            (Some(_), Some(_)) => Err(wrong(key, format!("it stands beside {key}_file; take one of them out"))),
            (Some(text), None) => Ok(Some(text.into_bytes())),
            (None, None) => Ok(None),
            (None, Some(named)) => {
                let named = path.parent().unwrap_or(Path::new("")).join(named);
                let bytes = read(&named)?;
                contents.push((named, bytes.clone()));
                Ok(Some(bytes))
            }
        };
        let parts = [
            part("cert", tls.cert, tls.cert_file)?,
            part("key", tls.key, tls.key_file)?,
            part("client_ca", tls.client_ca, tls.client_ca_file)?,
        ];
        let versions = tls.min_version.unwrap_or(Version::TLS12)..=tls.max_version.unwrap_or(Version::TLS13);
        let config = server(parts, tls.client_auth_type, versions).map_err(|(key, why)| wrong(key, why))?;
        let asks_who = !users.hashes.is_empty() || tls.client_auth_type != ClientAuth::NoClientCert;
        Ok(Self { tls: Some(Arc::new(config)), users, headers, asks_who })
    }
}

/// TLS with a certificate, its key, and the authorities of clients. An error has the key that it is
/// about.
fn server(
    [cert, key, client_ca]: [Option<Vec<u8>>; 3],
    auth: ClientAuth,
    versions: std::ops::RangeInclusive<Version>,
) -> Result<ServerConfig, (&'static str, String)> {
    let provider = Arc::new(ring::default_provider());
    let certificates = |name, bytes: Option<Vec<u8>>| {
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes.unwrap_or_default()).collect();
        match all {
            Ok(all) if !all.is_empty() => Ok(all),
            _ => Err((name, "a certificate in PEM is needed; name a file that begins with one".to_owned())),
        }
    };
    let chain = certificates("cert_file", cert)?;
    let key = PrivateKeyDer::from_pem_slice(&key.unwrap_or_default())
        .map_err(|_| ("key_file", "a private key in PEM, without a password, is needed".to_owned()))?;
    let all = [(Version::TLS12, &TLS12), (Version::TLS13, &TLS13)].into_iter();
    let asked: Vec<_> = all.filter(|(version, _)| versions.contains(version)).map(|(_, of_rustls)| of_rustls).collect();
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&asked)
        .map_err(|_| ("min_version", "it is above max_version; take one of them out".to_owned()))?;
    let builder = match (auth, client_ca) {
        (ClientAuth::NoClientCert, None) => builder.with_no_client_auth(),
        (ClientAuth::NoClientCert, Some(_)) => {
            let why = "nobody is asked for a certificate; say client_auth_type: RequireAndVerifyClientCert, too";
            return Err(("client_ca_file", why.to_owned()));
        }
        (_, ca) => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(certificates("client_ca_file", ca)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            let verifier = match auth {
                ClientAuth::VerifyClientCertIfGiven => verifier.allow_unauthenticated(),
                _ => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| ("client_ca_file", e.to_string()))?)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| ("cert_file", format!("{error}; name a certificate and its own key")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A certificate is checked at each connection: none goes on with an earlier one's word.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

#[cfg(test)]
mod tests;
