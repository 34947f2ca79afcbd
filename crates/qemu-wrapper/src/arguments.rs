//! What QEMU's command line says, as far as it matters here (qemu(1)).
//!
//! An option is `-machine` or `--machine`, and the next argument is its value: a type, and
//! properties after commas. Of several values of a property the last counts. Values of other
//! options are not told from options; an image file of the name `-machine` would be misread.

/// Whether it starts a machine with memory. Those who ask what QEMU can do give the machine
/// `none`, or ask for a help text or the version.
pub(crate) fn runs_guest(arguments: &[&[u8]]) -> bool {
    let asks = |argument: &&[u8]| matches!(option(argument), Some(b"version" | b"help" | b"h"));
    let is_help = |argument: &&[u8]| matches!(*argument, b"help" | b"?");
    let machine = properties(arguments).fold(None, |machine, (name, value)| match name {
        b"type" => Some(value),
        _ => machine,
    });
    !arguments.iter().any(asks) && !arguments.iter().any(is_help) && machine != Some(b"none")
}

/// Whether it keeps the guest's memory from being merged (`mem-merge=off`), as libvirt does for
/// `<nosharepages/>`. QEMU marks nothing then.
pub(crate) fn opts_out(arguments: &[&[u8]]) -> bool {
    properties(arguments).fold(false, |out, (name, value)| match name {
        b"mem-merge" => matches!(value, b"off" | b"no" | b"n" | b"false"),
        _ => out,
    })
}

/// The properties of the machine, in their order. The first one may be without a name: the type.
fn properties<'a>(arguments: &'a [&'a [u8]]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let is_machine = |argument: &[u8]| matches!(option(argument), Some(b"machine" | b"M"));
    let values = arguments.windows(2).filter(move |pair| is_machine(pair[0])).map(|pair| pair[1]);
    values.flat_map(|value| value.split(|&byte| byte == b',').enumerate()).map(|(at, property)| {
        match property.iter().position(|&byte| byte == b'=') {
            Some(equals) => (&property[..equals], &property[equals + 1..]),
            None if at == 0 => (&b"type"[..], property),
            None => (property, &b"on"[..]),
        }
    })
}

/// The name of an option.
fn option(argument: &[u8]) -> Option<&[u8]> {
    argument.strip_prefix(b"-").map(|name| name.strip_prefix(b"-").unwrap_or(name))
}
