//! Who is known to the exporter: passwords and certificates, by the file of `--web.config.file`.
//! curl asks, as an administrator would; openssl makes the certificates.

use std::path::Path;

use super::*;

/// Hashes of `secret` and of `other`, of crypt(3).
const SECRET: &str = "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";
const OTHER: &str = "$2y$05$bbcdefghijklmnopqrstuuRbJMaOE85Jzy7YxrhO2UtTmhGFRpQlO";

/// Runs a program in a directory, to its good end.
fn run(dir: &Path, program: &str, words: &[&str]) {
    let out = Command::new(program).args(words).current_dir(dir).output();
    let out = out.unwrap_or_else(|error| panic!("{program}: {error}: scripts/deps.sh test installs it"));
    assert!(out.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// The status and the text that curl gets; status 0: no answer.
fn curl(dir: &Path, place: &str, words: &[&str]) -> (u32, String) {
    let mut command = Command::new("curl");
    command.args(["--silent", "--max-time", "60", "--write-out", "\n%{http_code}", place]).args(words);
    let out = command.current_dir(dir).output().expect("curl: scripts/deps.sh test installs it");
    let text = String::from_utf8(out.stdout).unwrap();
    let (text, code) = text.rsplit_once('\n').unwrap();
    (code.parse().unwrap(), text.to_owned())
}

/// A key and a certificate for this host or a client, signed by `ca.pem`; `ca`: signed by itself.
fn certificate(dir: &Path, name: &str) {
    let text = "[req]\ndistinguished_name = dn\nprompt = no\n[dn]\nCN = localhost\n\
                [leaf]\nsubjectAltName = IP:127.0.0.1\nbasicConstraints = critical, CA:FALSE\n\
                [ca]\nbasicConstraints = critical, CA:TRUE\n";
    std::fs::write(dir.join("req.cnf"), text).unwrap();
    let (key, pem) = (format!("{name}.key"), format!("{name}.pem"));
    let make = "req -x509 -config req.cnf -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30";
    let mut words: Vec<&str> = make.split(' ').chain(["-keyout", &key, "-out", &pem, "-extensions"]).collect();
    match name.starts_with("ca") {
        true => words.push("ca"),
        false => words.extend(["leaf", "-CA", "ca.pem", "-CAkey", "ca.key"]),
    }
    run(dir, "openssl", &words);
}

#[test]
fn a_password_opens_what_others_do_not_see_and_changes_without_a_restart() {
    let daemon = Daemon::start();
    let _clients = merged(&daemon);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("web.yml");
    std::fs::write(&file, format!("basic_auth_users:\n  ann: {SECRET}\n")).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    let words = ["--listen", "127.0.0.1:0", "--web.config.file", file.to_str().unwrap()];
    let mut exporter = Exporter::start(&daemon, &words);
    assert!(exporter.note().contains("every account can read the secrets in"));
    let place = exporter.place.clone();
    let curl = |words: &[&str]| curl(dir.path(), &place, words);
    let (code, text) = curl(&["--user", "ann:secret"]);
    assert!(code == 200 && text.contains("pageone_client_pages{"), "{code} {text}");
    for words in [&["--user", "ann:wrong"][..], &["--user", "eve:secret"], &[]] {
        let (code, text) = curl(words);
        assert!(code == 401 && !text.contains("pageone_"), "{words:?}: {code} {text}");
    }
    let (_, head) = curl(&["--head"]);
    assert!(head.contains("www-authenticate: Basic realm=\"PageONE\""), "{head}");

    std::fs::write(&file, format!("basic_auth_users:\n  ann: {OTHER}\n")).unwrap();
    eventually("the new password is taken", PATIENCE, || (curl(&["--user", "ann:other"]).0 == 200).then_some(()));
    assert_eq!(curl(&["--user", "ann:secret"]).0, 401, "the old one is not");
    // What is half written changes nothing.
    std::fs::write(&file, "basic_auth_users:\n  ann: ").unwrap();
    assert!(exporter.note().contains("was read again"));
    eventually("a file that cannot be used is named", PATIENCE, || {
        assert_eq!(curl(&["--user", "ann:other"]).0, 200);
        assert_eq!(curl(&[]).0, 401);
        let waits = rustix::io::ioctl_fionread(exporter.notes.get_ref()).unwrap();
        (waits > 0).then_some(())
    });
    assert!(exporter.note().contains("what was read before stays in effect"));
}

#[test]
fn tls_asks_for_certificates_of_clients_and_takes_a_new_one_of_its_own() {
    let daemon = Daemon::start();
    let _clients = merged(&daemon);
    let dir = tempfile::tempdir().unwrap();
    ["ca", "host", "client"].iter().for_each(|name| certificate(dir.path(), name));
    let own = "tls_server_config:\n  cert_file: host.pem\n  key_file: host.key\n";
    let checked = |how: &str| format!("{own}  client_ca_file: ca.pem\n  client_auth_type: {how}\n");
    let start = |text: &str| {
        let file = dir.path().join("web.yml");
        std::fs::write(&file, text).unwrap();
        let exporter =
            Exporter::start(&daemon, &["--listen", "127.0.0.1:0", "--web.config.file", file.to_str().unwrap()]);
        assert!(exporter.place.starts_with("https://127.0.0.1:"), "{}", exporter.place);
        exporter
    };
    let ca = ["--cacert", "ca.pem"];
    let known = [&ca[..], &["--cert", "client.pem", "--key", "client.key"]].concat();
    let of = |exporter: &Exporter, words: &[&str]| curl(dir.path(), &exporter.place, words);
    let names = |exporter: &Exporter, words: &[&str]| {
        let (code, text) = of(exporter, words);
        (code, text.contains("pageone_client_pages{"))
    };

    let exporter = start(own);
    assert_eq!(names(&exporter, &ca), (200, false), "TLS alone says nothing of who asks");
    assert_eq!(of(&exporter, &[]).0, 0, "curl does not know who signed it");
    assert_eq!(of(&exporter, &[&ca[..], &["--tlsv1.2", "--tls-max", "1.2"]].concat()).0, 200);
    // Of others than the first, as when a certificate is renewed.
    std::fs::rename(dir.path().join("ca.pem"), dir.path().join("old.pem")).unwrap();
    ["ca", "host"].iter().for_each(|name| certificate(dir.path(), name));
    eventually("the new certificate is shown", PATIENCE, || (of(&exporter, &ca).0 == 200).then_some(()));
    drop(exporter);

    certificate(dir.path(), "client");
    let exporter = start(&checked("RequireAndVerifyClientCert"));
    assert_eq!(names(&exporter, &known), (200, true));
    assert_eq!(of(&exporter, &ca).0, 0);
    drop(exporter);
    let exporter = start(&checked("VerifyClientCertIfGiven"));
    assert_eq!(names(&exporter, &known), (200, true));
    assert_eq!(names(&exporter, &ca), (200, false));
    drop(exporter);
    let exporter = start(&format!("{own}  min_version: TLS13\nbasic_auth_users: {{ann: {SECRET}}}\n"));
    assert_eq!(names(&exporter, &[&ca[..], &["--user", "ann:secret"]].concat()), (200, true));
    assert_eq!(names(&exporter, &ca), (401, false));
    assert_eq!(of(&exporter, &[&ca[..], &["--tls-max", "1.2"]].concat()).0, 0);
}

#[test]
fn a_file_that_asks_for_what_there_is_not_is_refused_by_name() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    ["ca", "host"].iter().for_each(|name| certificate(dir.path(), name));
    let file = dir.path().join("web.yml");
    for (text, named) in [
        (
            "tls_server_config: {cert_file: host.pem, key_file: host.key, client_allowed_sans: [a]}",
            "client_allowed_sans",
        ),
        ("tls_server_config: {cert_file: host.pem, key_file: ca.key}", "name a certificate and its own key"),
        ("tls_server_config: {cert_file: host.pem, key_file: ca.pem}", "key_file: a private key in PEM"),
        ("tls_server_config: {cert_file: host.pem, key_file: none.key}", "none.key"),
        ("tls_server_config: {cert_file: host.pem, key_file: host.key, client_ca_file: ca.pem}", "client_auth_type"),
        ("rate_limit: {burst: 20}", "rate_limit"),
    ] {
        std::fs::write(&file, text).unwrap();
        let words = ["metrics", "--listen", "127.0.0.1:0", "--web.config.file", file.to_str().unwrap()];
        let refused = daemon.pageone(&words).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(named), "{text}: {said}");
    }
}
