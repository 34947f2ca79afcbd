use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::SystemTime;

use proptest::prelude::*;

use super::*;

const PID: i32 = 4711;
const UUID: &str = "dcf47dbd-46d1-4d5b-b442-262a806a333a";
const PROJECT: &str = "2d1d6c8084544f09a3e78b0a5f5ab323";
const POD: &str = "2c48913c-b29f-11e7-9350-020968147796";

/// A host whose files lie in a directory, with one process on it.
struct Host(tempfile::TempDir);

impl Host {
    /// The process is in this cgroup, and in the daemon's namespaces.
    fn with(cgroup: &str) -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        for (at, ino) in [("ns/pid", "p"), ("ns/user", "u"), ("root", "r")] {
            host.write(&format!("kernel/{ino}"), "");
            for process in ["self".to_owned(), PID.to_string()] {
                let link = host.path(&format!("proc/{process}/{at}"));
                fs::create_dir_all(link.parent().unwrap()).unwrap();
                symlink(host.path(&format!("kernel/{ino}")), link).unwrap();
            }
        }
        host.write(&format!("proc/{PID}/cgroup"), cgroup);
        host.write(&format!("proc/{PID}/stat"), stat("qemu) S 1 (x", 98765));
        host
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.0.path().join(file)
    }

    fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// The process has another file there than the daemon.
    fn differs(&self, at: &str) {
        let link = self.path(&format!("proc/{PID}/{at}"));
        fs::remove_file(&link).unwrap();
        self.write("kernel/other", "");
        symlink(self.path("kernel/other"), link).unwrap();
    }

    fn label(&self, label: &str) {
        self.write(&format!("proc/{PID}/attr/current"), label);
    }

    fn find(&self) -> Option<Guest> {
        find(self.0.path(), PID)
    }

    /// The domain's tenant, as text, without rules.
    fn tenant(&self) -> String {
        self.by(&[])
    }

    fn by(&self, rules: &[TenantRule]) -> String {
        let tenant = judge(rules, self.find()).tenant;
        tenant.map_or("user".into(), |tenant| format!("{}:{}", tenant.source, tenant.value))
    }
}

fn stat(name: &str, start: u64) -> String {
    let before: Vec<_> = (4..22).map(|field| field.to_string()).collect();
    format!("{PID} ({name}) S {} {start} 23 24\n", before.join(" "))
}

const LIBVIRT: &str = "0::/machine.slice/machine-qemu\\x2d3\\x2dweb\\x2d1.scope/libvirt/emulator\n";

/// The beginning and the end of what libvirt 9.0 writes, with nova's metadata.
fn domstatus(pid: i32, id: u32, metadata: &str) -> String {
    format!(
        "<!--\nWARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE\nOVERWRITTEN AND LOST.\n-->\n\n\
         <domstatus state='running' reason='booted' pid='{pid}'>\n  <taint flag='high-privileges'/>\n  <vcpus>\n    \
         <vcpu id='0' pid='195156'/>\n  </vcpus>\n  <domain type='kvm' id='{id}'>\n    <name>web-1</name>\n    \
         <uuid>{UUID}</uuid>\n    {metadata}\n    <memory unit='KiB'>1024000</memory>\n    <resource>\n      \
         <partition>/machine</partition>\n    </resource>\n    <devices>\n      <disk><source><name>x</name></source>\
         </disk>\n    </devices>\n  </domain>\n</domstatus>\n"
    )
}

fn nova() -> String {
    format!(
        "<metadata><nova:instance xmlns:nova=\"http://openstack.org/xmlns/libvirt/nova/1.1\"><nova:name>a &lt;b&gt;\
         </nova:name><nova:owner><nova:user uuid=\"2a92\">u</nova:user><nova:project uuid=\"{PROJECT}\">acme\
         </nova:project></nova:owner></nova:instance></metadata>"
    )
}

const XML: &str = "run/libvirt/qemu/web-1.xml";

#[test]
fn a_guest_of_nova_has_the_domain_of_its_project() {
    let host = Host::with(LIBVIRT);
    host.write("run/libvirt/qemu/other.xml", domstatus(PID + 1, 2, ""));
    host.write(XML, domstatus(PID, 3, &nova()));
    host.label(&format!("libvirt-{UUID} (enforce)\n"));
    let verdict = judge(&[], host.find());
    assert_eq!(verdict.tenant, Some(Tenant::new("project", PROJECT)));
    assert_eq!(
        (verdict.manager, verdict.guest.as_deref(), verdict.name.as_deref()),
        (Some("libvirt"), Some(UUID), Some("web-1"))
    );
    assert_eq!((verdict.rule.as_str(), verdict.unknown), ("default: by project", None));
}

#[test]
fn a_guest_without_a_tenant_has_a_domain_of_its_own_and_a_partition_is_one() {
    let host = Host::with(LIBVIRT);
    host.write(XML, domstatus(PID, 3, ""));
    assert_eq!(host.tenant(), "guest:qemu-3-web-1");
    assert_eq!(judge(&[], host.find()).guest.as_deref(), Some(UUID));
    let host = Host::with("0::/machine.slice/machine-b.slice/machine-qemu\\x2d3\\x2dweb.scope/libvirt/emulator\n");
    assert_eq!(host.tenant(), "slice:machine-b.slice");
    let unknown = judge(&[], host.find()).unknown.unwrap();
    assert!(unknown.contains("/run/libvirt/qemu can't be read"), "{unknown}");
}

#[test]
fn a_group_outside_of_the_daemons_cgroup_namespace_is_a_domain_of_its_own() {
    for group in ["0::/../machine.slice/machine-qemu\\x2d3\\x2dweb.scope\n", "0::/../../user.slice/x\n", "0::/..\n"] {
        let verdict = judge(&[], Host::with(group).find());
        assert_eq!(verdict.tenant.unwrap().source, "process", "{group}");
        assert!(verdict.unknown.unwrap().contains("outside of the daemon's cgroup namespace"), "{group}");
    }
}

#[test]
fn what_contradicts_the_kernel_does_not_count() {
    let own = "guest:qemu-3-web-1";
    let labelled = |id, label: &str| {
        let host = Host::with(LIBVIRT);
        host.write(XML, domstatus(PID, id, &nova()));
        host.label(label);
        host
    };
    assert_eq!(labelled(3, "unconfined\n").tenant(), format!("project:{PROJECT}"), "no label of libvirt");
    let host = labelled(4, "unconfined\n");
    assert_eq!(host.tenant(), own, "a stale file: its process number was used again");
    assert!(judge(&[], host.find()).unknown.unwrap().contains("restart libvirtd"));
    let other = UUID.replace('d', "0");
    assert_eq!(labelled(3, &format!("libvirt-{other} (enforce)\n")).tenant(), own, "another guest's label");

    // Without a cgroup of libvirt's the label must be there.
    let host = Host::with("0::/system.slice/libvirtd.service\n");
    host.write(XML, domstatus(PID, 3, &nova()));
    assert_eq!(host.tenant(), "user", "a file alone makes no guest");
    host.label(&format!("libvirt-{UUID} (enforce)"));
    assert_eq!(host.tenant(), format!("project:{PROJECT}"));
    host.label(&format!("libvirt-{other} (enforce)"));
    assert_eq!(host.tenant(), format!("process:{PID}-98765"));
}

#[test]
fn files_that_others_can_write_do_not_count() {
    let host = Host::with(LIBVIRT);
    host.write(XML, domstatus(PID, 3, &nova()));
    let mode = |file: &str, mode| fs::set_permissions(host.path(file), fs::Permissions::from_mode(mode)).unwrap();
    let own = "guest:qemu-3-web-1";
    mode(XML, 0o620);
    assert_eq!(host.tenant(), own, "its group");
    assert!(judge(&[], host.find()).unknown.unwrap().contains("chmod go-w"));
    mode(XML, 0o600);
    mode("run/libvirt/qemu", 0o777);
    assert_eq!(host.tenant(), own, "the directory");
    // Where others may write, what was written since the process started counts.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let booted = |ago: u64| host.write("proc/stat", format!("cpu 1 2\nbtime {}\n", now - 987 - ago));
    booted(10);
    assert_eq!(host.tenant(), format!("project:{PROJECT}"), "written ten seconds after the start");
    mode(XML, 0o606);
    assert_eq!(host.tenant(), own, "the file");
    mode(XML, 0o600);
    host.write("proc/stat", format!("btime {}\n", now));
    assert_eq!(host.tenant(), own, "a stale file, kept there by somebody");
    let why = judge(&[], host.find()).unknown.unwrap();
    assert!(why.contains("if the clock was set since, restart libvirtd"), "{why}");
    mode("run/libvirt/qemu", 0o755);
    assert_eq!(host.tenant(), format!("project:{PROJECT}"));
    fs::rename(host.path(XML), host.path("elsewhere")).unwrap();
    symlink(host.path("elsewhere"), host.path(XML)).unwrap();
    assert_eq!(host.tenant(), own, "a link");
    if rustix::process::geteuid().is_root() {
        fs::rename(host.path("elsewhere"), host.path(XML)).unwrap();
        std::os::unix::fs::chown(host.path(XML), Some(1000), None).unwrap();
        assert_eq!(host.tenant(), own, "another user's");
    }
}

#[test]
fn hostile_files_make_nobody_a_tenant() {
    let good = domstatus(PID, 3, &nova());
    let twice = nova().replace("</metadata>", "").replace("<metadata>", "");
    let deep = "<a>".repeat(300_000);
    let tag = format!("<domstatus pid='{PID}'>");
    let entities = format!("<!DOCTYPE x [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]>{}", good.replace("web-1", "&b;"));
    let files: Vec<Vec<u8>> = vec![
        vec![],
        vec![0xff; 4096],
        vec![0; 4096],
        good.replace("web-1", "web\0").into_bytes(),
        [good.as_bytes(), &[0xff]].concat(),
        good[..good.len() / 2].to_owned().into_bytes(),
        format!("{good}{}", " ".repeat(2 << 20)).into_bytes(),
        format!("{tag}{deep}").into_bytes(),
        format!("{tag}{deep}{}</domstatus>", "</a>".repeat(300_000)).into_bytes(),
        format!("{tag}{}</domstatus>", "<a/>".repeat(200_000)).into_bytes(),
        entities.into_bytes(),
        good.replace("</domain>", &format!("<metadata>{twice}</metadata></domain>")).into_bytes(),
        good.replace("<metadata>", &format!("<metadata>{twice}")).into_bytes(),
        good.replace("openstack.org/xmlns/libvirt/nova/", "evil.example/").into_bytes(),
        good.replace(PROJECT, "").into_bytes(),
        good.replace(UUID, "../../../etc/passwd").into_bytes(),
        good.replace("domstatus", "domain").into_bytes(),
        good.replace("id='3'", "id='+3'").replace("id='+3'", "id='x'").into_bytes(),
    ];
    for (number, text) in files.iter().enumerate() {
        let host = Host::with(LIBVIRT);
        host.write(XML, text);
        assert_eq!(host.tenant(), "guest:qemu-3-web-1", "file {number}");
    }
    let host = Host::with(LIBVIRT);
    host.write(XML, [0xff; 4096]);
    let unknown = judge(&[], host.find()).unknown.unwrap();
    assert!(unknown.ends_with("it has more than 1 MiB, or is no text"), "{unknown}");
    host.write(XML, domstatus(PID + 1, 3, ""));
    let unknown = judge(&[], host.find()).unknown.unwrap();
    assert!(unknown.contains("names process 4711; see that libvirt runs"), "{unknown}");
    host.write(XML, good);
    assert_eq!(host.tenant(), format!("project:{PROJECT}"), "the one that is right");
}

#[test]
fn a_cgroup_says_what_manages_a_guest() {
    let systemd = "12:memory:/\n1:name=systemd:/qemu.slice/104.scope\n0::/user.slice\n";
    for (cgroup, tenant) in [
        (systemd, "guest:104"),
        ("0::/qemu.slice/104.scope\n", "guest:104"),
        ("0::/qemu.slice/web.scope\n", "guest:qemu.slice/web.scope"),
        ("0::/machine/qemu-3-web.libvirt-qemu/emulator\n", "guest:qemu-3-web"),
        ("4:memory:/machine/b.partition/qemu-3-web.libvirt-qemu\n3:cpu:/\n", "slice:machine/b.partition"),
        ("0::/machine.slice/libpod-12ab.scope/container\n", "guest:machine.slice/libpod-12ab.scope"),
        ("0::/acme.slice/acme-vms.slice/vm1.service\n", "slice:acme-vms.slice"),
        ("0::/acme.slice/umbrella-vms.slice/vm1.service\n", "slice:acme.slice"),
        ("0::/system.slice/vm1.service\n", "user"),
        ("0::/init.scope\n", "user"),
        ("0::/\n", "user"),
        ("0::/../machine.slice/machine-b.slice\n", "process:4711-98765"),
        ("", "user"),
    ] {
        assert_eq!(Host::with(cgroup).tenant(), tenant, "{cgroup}");
    }
    let pods = [
        format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-1.scope",
            POD.replace('-', "_")
        ),
        format!("0::/kubepods.slice/kubepods-pod{}.slice/crio-1.scope", POD.replace('-', "_")),
        format!("11:memory:/kubepods/besteffort/pod{POD}/1234\n0::/\n"),
    ];
    for cgroup in pods {
        assert_eq!(Host::with(&cgroup).tenant(), format!("guest:{POD}"), "{cgroup}");
    }
}

#[test]
fn groups_that_a_user_or_a_guest_makes_below_its_own_count_for_nothing() {
    let victim = "machine.slice/machine-b.slice/machine-qemu\\x2d3\\x2dweb.scope";
    let user = "user.slice/user-1000.slice/user@1000.service";
    for below in [victim, "qemu.slice/104.scope", "kubepods/pod2c48913c-b29f", "acme.slice"] {
        assert_eq!(Host::with(&format!("0::/{user}/{below}\n")).tenant(), "user", "{below}");
        let host = Host::with(&format!("0::/machine.slice/machine-qemu\\x2d9\\x2dmine.scope/{below}\n"));
        assert_eq!(host.tenant(), "guest:qemu-9-mine", "{below}");
        let host = Host::with(&format!("0::/qemu.slice/9.scope/{below}\n"));
        assert_eq!(host.tenant(), "guest:9", "{below}");
        let host = Host::with(&format!("0::/kubepods/burstable/pod{POD}/c/{below}\n"));
        assert_eq!(host.tenant(), format!("guest:{POD}"), "{below}");
    }
}

#[test]
fn a_guest_of_proxmox_has_the_domain_of_its_pool_and_a_rule_may_take_tags() {
    let host = Host::with("0::/qemu.slice/104.scope\n");
    let conf = "# tags: comment\nname: web\ntags: beta;acme\nmemory: 2048\n\n[before]\ntags: umbrella\n";
    host.write("etc/pve/qemu-server/104.conf", conf);
    host.write("etc/pve/user.cfg", "user:root@pam:1:0:::::\npool:acme:VMs%3A 104:100,104:local:\npool:b::1040:\n");
    assert_eq!(host.tenant(), "pool:acme");
    assert_eq!(judge(&[], host.find()).name.as_deref(), Some("web"));
    let tags = |is: &[&str]| {
        let is = is.iter().map(|&tag| tag.to_owned()).collect();
        [TenantRule { manager: Some(ManagedBy::Proxmox), by: Some(TenantBy::Tag), is, ..TenantRule::default() }]
    };
    assert_eq!(host.by(&tags(&["acme", "beta"])), "tag:acme", "the order of the list");
    assert_eq!(host.by(&tags(&["umbrella", "comment"])), "pool:acme", "a snapshot's and a comment's do not count");
    host.write("etc/pve/user.cfg", "pool:acme::104::\npool:b::104::\npool:::104::\n");
    assert_eq!(host.tenant(), "guest:104", "in two pools");
    fs::remove_file(host.path("etc/pve/user.cfg")).unwrap();
    assert!(judge(&[], host.find()).unknown.unwrap().contains("user.cfg can't be read"));
}

#[test]
fn a_pod_has_the_domain_of_its_namespace() {
    let host = Host::with(&format!("0::/kubepods/pod{POD}/1\n"));
    let unknown = judge(&[], host.find()).unknown.unwrap();
    assert!(unknown.contains("/var/log/pods can't be read"), "{unknown}");
    for pod in ["kube-system_dns_0c48913c-b29f-11e7-9350-020968147796", "a_b_c_d", "x"] {
        fs::create_dir_all(host.path("var/log/pods").join(pod)).unwrap();
    }
    assert_eq!(host.tenant(), format!("guest:{POD}"));
    let unknown = judge(&[], host.find()).unknown.unwrap();
    assert!(unknown.contains("so its namespace is not known"), "{unknown}");
    host.write(&format!("var/log/pods/file_x_{POD}"), "");
    assert_eq!(host.tenant(), format!("guest:{POD}"), "no directory");
    fs::create_dir_all(host.path("var/log/pods").join(format!("acme_web-0_{POD}"))).unwrap();
    assert_eq!((host.tenant(), judge(&[], host.find()).name), ("namespace:acme".into(), Some("web-0".into())));
    fs::create_dir_all(host.path("var/log/pods").join(format!("umbrella_web-0_{POD}"))).unwrap();
    assert_eq!(host.tenant(), format!("guest:{POD}"), "two namespaces");
}

#[test]
fn a_containers_root_is_not_the_hosts() {
    for at in ["ns/pid", "ns/user", "root"] {
        let host = Host::with("0::/system.slice/docker-12ab.scope\n");
        assert_eq!(host.tenant(), "user");
        host.differs(at);
        assert!(
            host.tenant().starts_with(&format!("container:{}-", at.trim_start_matches("ns/"))),
            "{}",
            host.tenant()
        );
        fs::remove_file(host.path(&format!("proc/{PID}/{at}"))).unwrap();
        assert_eq!(host.tenant(), format!("process:{PID}-98765"), "what cannot be told is a process by itself");
    }
}

#[test]
fn the_first_rule_that_matches_counts() {
    let host = Host::with("0::/machine.slice/machine-b.slice/machine-qemu\\x2d3\\x2dweb.scope\n");
    host.write(XML, domstatus(PID, 3, &nova()));
    let rule = |text: &str| toml_rule(text);
    assert_eq!(host.by(&[rule("by=slice")]), "slice:machine-b.slice", "before nova's project");
    assert_eq!(host.by(&[rule("manager=proxmox,domain=x"), rule("manager=libvirt,domain=mine")]), "tenant:mine");
    assert_eq!(host.by(&[rule("by=name,is=web-1,domain=web"), rule("domain=x")]), "tenant:web");
    assert_eq!(host.by(&[rule("by=name,is=web-2,domain=web"), rule("domain=x")]), "tenant:x");
    assert_eq!(host.by(&[rule(&format!("by=guest,is={UUID}"))]), "guest:qemu-3-web");
    assert_eq!(host.by(&[rule("by=pool")]), format!("project:{PROJECT}"), "it has none");
    let verdict = judge(&[rule("by=pool"), rule("manager=libvirt,by=name")], host.find());
    assert_eq!(verdict.rule, "[[tenants]] 2: manager = \"libvirt\", by = \"name\"");
    assert_eq!(Host::with("0::/\n").by(&[rule("domain=x")]), "user", "no rule is for what nothing manages");
}

/// `key=value` pairs as a rule.
fn toml_rule(text: &str) -> TenantRule {
    let pairs = text.split(',').map(|pair| pair.split_once('=').unwrap());
    let pairs = pairs.map(|(key, value)| {
        let value = if key == "is" { serde_json::json!([value]) } else { serde_json::json!(value) };
        (key.to_owned(), value)
    });
    serde_json::from_value(pairs.collect::<serde_json::Map<_, _>>().into()).unwrap()
}

proptest! {
    /// Whatever files say, nothing panics, and what libvirt's guest becomes is its own domain or
    /// something that its cgroup or an intact file says.
    #[test]
    fn no_bytes_panic(text in "(?s).{0,200}", words in proptest::collection::vec(
        "pool|:|,|104|\n|tags|;|\\[|/|\\.slice|machine|-|qemu|x2d|kubepods|pod|_|0::|<domstatus pid='4711'>|<domain id='3'>|<uuid>|>|'", 0..60,
    )) {
        for text in [text, words.concat()] {
            let _ = cgroup::place(&text);
            let _ = cgroup::place(&format!("0::/{text}"));
            let _ = libvirt::parse(&text, PID);
            let _ = libvirt::parse(&format!("<domstatus pid='{PID}'>{text}"), PID);
            let _ = proxmox::of_guest(&text);
            let _ = proxmox::pool(&text, "104");
            let _ = kubernetes::parse(&text, POD);
            let user = cgroup::place(&["0::/user.slice/", &text.replace('\n', ""), "\n"].concat());
            prop_assert!(!matches!(user, Ok(Some(_))));
        }
    }
}
