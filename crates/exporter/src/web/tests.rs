//! What stands in the file, and what must not.

use super::*;

/// A hash of `secret`.
const HASH: &str = "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, text: &str) -> PathBuf {
        let path = self.0.path().join("web.yml");
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name_with_the_remedy() {
    let place = Place::new();
    for (text, named) in [
        ("tls_server_config: {client_allowed_sans: [a]}", "client_allowed_sans"),
        ("tls_server_config: {cipher_suites: [TLS_AES_128_GCM_SHA256]}", "cipher_suites"),
        ("tls_server_config: {min_version: TLS10}", "TLS10"),
        ("tls_server_config: {client_auth_type: RequireAnyClientCert}", "RequireAnyClientCert"),
        ("auth_excluded_paths: [/metrics]", "auth_excluded_paths"),
        ("rate_limit: {burst: 20}", "rate_limit"),
        ("http_server_config: {headers: {Server: x}}", "Server cannot be set"),
        ("http_server_config: {http2: true}", "http2: there is HTTP/1.1 alone"),
        ("basic_auth_users: {ann: secret}", "htpasswd -nBC 10 ann"),
        ("basic_auth_users: {ann: a, ann: b}", "ann"),
        ("tls_server_config: {}", "cert_file: a certificate in PEM is needed"),
        ("tls_server_config: {cert: a, cert_file: b}", "cert: it stands beside cert_file"),
        ("tls_server_config: {cert_file: nowhere.pem}", "nowhere.pem"),
        ("- a", "web.yml"),
        ("a: [", "web.yml"),
    ] {
        let error = Watched::new(place.write(text)).unwrap_err();
        assert!(error.to_string().contains(named), "{text}: {error}");
    }
    let error = Watched::new(place.0.path().join("none.yml")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("none.yml: No such file"), "{error}");
}

#[test]
fn no_secret_is_in_an_error() {
    let text = format!("basic_auth_users:\n  ann: {HASH}\n  bob: [{HASH}]\n");
    let error = Watched::new(Place::new().write(&text)).unwrap_err().to_string();
    assert!(error.contains("line 3") && !error.contains("$2y$"), "{error}");
}

#[test]
fn changes_are_seen_and_a_file_that_cannot_be_used_leaves_what_was_read() {
    let place = Place::new();
    let mut web = Watched::new(place.write(&format!("basic_auth_users:\n  ann: {HASH}\n"))).unwrap();
    assert!(web.asks_who() && web.scheme() == "http");
    let mut now = |text: &str| {
        place.write(text);
        web.at = Instant::now().checked_sub(AGAIN).unwrap();
        web.now()
    };
    let users = format!("basic_auth_users: {{ann: {HASH}}}\n");
    let with_field = format!("{users}http_server_config:\n  headers:\n    X-Frame-Options: deny\n");
    let fields = now(&with_field);
    assert!(!fields.users.hashes.is_empty() && fields.headers["x-frame-options"] == "deny");
    for half in ["", "basic_auth_users: [", "http_server_config:\n", "basic_auth_users: {}"] {
        assert!(Arc::ptr_eq(&now(half), &fields), "{half}");
    }
    assert!(Arc::ptr_eq(&now(&with_field), &fields));
    assert!(now(&users).headers.is_empty());
}

#[test]
fn secrets_that_every_account_can_read_are_named() {
    let place = Place::new();
    let path = place.write(&format!("basic_auth_users: {{ann: {HASH}}}"));
    for (mode, is_named) in [(0o644, true), (0o640, false)] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        assert_eq!(!Watched::new(path.clone()).unwrap().readable().is_empty(), is_named, "{mode:o}");
    }
    let path = place.write("http_server_config: {}");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    assert!(Watched::new(path).unwrap().readable().is_empty(), "there is no secret in it");
}
