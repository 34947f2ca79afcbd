//! PageONE: regions, the page ledger, periods, workers, stores and the merge protocol.
