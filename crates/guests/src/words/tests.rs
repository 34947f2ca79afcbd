use super::*;

pub(crate) fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

#[test]
fn options_have_values() {
    let line = words("-m 512 -S --cpu qemu64,-cx16 -append -x -device virtio-net-pci,mac=1,netdev=n");
    // A value is no option, whatever it is.
    assert_eq!(options(&words("-k append -hda x")).last().map(|option| option.name), Some("hda"));
    let all: Vec<_> = options(&line).map(|o| (o.name, o.value)).collect();
    let net = "virtio-net-pci,mac=1,netdev=n";
    assert_eq!(all, [("m", "512"), ("S", ""), ("cpu", "qemu64,-cx16"), ("append", ""), ("device", net)]);
    let device = options(&line).last().unwrap();
    assert_eq!(
        (&*device.first(), device.part("mac").as_deref(), device.part("ma")),
        ("virtio-net-pci", Some("1"), None)
    );
    assert_eq!(set_part(net, "mac", "2"), "virtio-net-pci,mac=2,netdev=n");
    assert_eq!(set_part("a", "mac", "2"), "a,mac=2");
}

#[test]
fn the_last_of_several_properties_counts() {
    let line = words("qemu -machine q35,mem-merge=on --machine mem-merge=off -name guest=web,debug-threads=on");
    assert_eq!(
        (property(&line, "machine", "mem-merge").as_deref(), property(&line, "name", "guest").as_deref()),
        (Some("off"), Some("web"))
    );
    assert_eq!((property(&line, "m", "size"), name(&line), uuid(&line)), (None, Some("web".into()), None));
}

#[test]
fn of_several_machines_the_last_counts() {
    for (line, probe) in [
        ("-machine none", true),
        ("-M accel=tcg,type=none", true),
        ("-machine none -machine accel=tcg", true),
        ("-machine none -machine pc", false),
        ("-machine none -M type=q35,accel=tcg", false),
        ("-machine pc", false),
    ] {
        assert_eq!(is_probe(&words(line)), probe, "{line}");
    }
}

#[test]
fn two_commas_are_one_in_a_part_and_none_is_lost() {
    for (value, meant) in [
        ("", vec![""]),
        ("a,b=c,", vec!["a", "b=c", ""]),
        (",,", vec![","]),
        (",,,b", vec![",", "b"]),
        ("file=/x/a,,b.img,if=none", vec!["file=/x/a,b.img", "if=none"]),
        ("a,,,,b,,,c", vec!["a,,b,", "c"]),
    ] {
        assert_eq!(parts(value).collect::<Vec<_>>(), meant, "{value}");
        assert_eq!(parts(value).map(|part| written(&part).into_owned()).collect::<Vec<_>>().join(","), value);
    }
    for (line, called) in [
        ("-name shop,,one", "shop,one"),
        ("-name shop,,two,process=x", "shop,two"),
        ("-name debug-threads=on,guest=a,,b", "a,b"),
        ("-name shop,,a=b", "shop,a=b"),
        ("-name one -name debug-threads=on", "one"),
        ("-name one -name guest=two", "two"),
    ] {
        assert_eq!(name(&words(line)).as_deref(), Some(called), "{line}");
    }
    assert_eq!(set_part("a,,mac=1,path=/x,,y,c,,d", "path", "/v,w"), "a,,mac=1,path=/v,,w,c,,d");
    assert_eq!(set_part("a", "path", "/v,w"), "a,path=/v,,w");
    assert_eq!(set_first("unix:/a,,b,server=on,c=d,,e", "unix:/v,w"), "unix:/v,,w,server=on,c=d,,e");
}
