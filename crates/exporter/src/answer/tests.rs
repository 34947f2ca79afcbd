//! Which format a scraper gets.

use super::*;

#[test]
fn the_format_is_the_one_that_accept_weighs_most() {
    let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                        application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
                        text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
    for (accept, format) in [
        (prometheus_3, Format::OpenMetrics),
        ("application/openmetrics-text", Format::OpenMetrics),
        ("text/plain, Application/OpenMetrics-Text; version=1.0.0", Format::OpenMetrics),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", Format::Prometheus),
        ("application/openmetrics-text;q=0", Format::Prometheus),
        ("application/openmetrics-text;q=none", Format::Prometheus),
        ("text/html,*/*;q=0.8", Format::Prometheus),
        ("", Format::Prometheus),
    ] {
        assert_eq!(preferred(accept), format, "{accept}");
    }
}
