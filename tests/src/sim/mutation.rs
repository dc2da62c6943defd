//! Planted bugs. Each is a change of what goes into or comes out of the real machines, made by the simulated recorder, guest or
//! disk: no product code carries a hook. A mutation names the judge that must catch it.

use crate::check::Judge;

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Ack what was taken, whether it is synced or not.
    AckBeforeSync,
    /// Ask to resume from what was received instead of from what is durable.
    ResumeFromReceived,
    /// A replay begins one page too late.
    ReplayOffByOne,
    /// Doubled frames are told by counting what a Hello promises to replay, not by their number.
    DedupByCount,
    /// No frame is dropped: what is replayed is stored again.
    NoDedup,
    /// The source's `completed` is taken for the commit.
    CommitOnCompleted,
    /// What is ahead in an old epoch is taken for loss.
    AheadIsLoss,
    /// The destination's ports are read as soon as they are open.
    ReadDestinationEarly,
    /// Every attachment uses the same epoch.
    EpochNotIncreased,
    /// A Hello is said once and never again.
    HelloNotRepeated,
    /// The guest is held until its queues are proven empty, however long that takes.
    DrainWithoutBudget,
    /// Recovery keeps a torn frame as if it were whole.
    RecoveryKeepsTorn,
    /// Recovery cuts one frame too many.
    RecoveryCutsSynced,
    /// The agent obeys a Hello that is not newer.
    StaleEpochObeyed,
    /// After an attempt that failed, the source's ports are not read any more.
    WayBackForgotten,
    /// A batch that the disk refused is taken for stored.
    RefusedIsStored,
    /// Two frames of a batch change places.
    BatchSwapped,
    /// A decoder goes on over the border of two hosts.
    DecoderAcrossHosts,
    /// A wedged socket is not connected anew.
    WedgeIgnored,
    /// The agent lets go of what a Hello's table says is made, not of what is acknowledged.
    FreeWhatIsSent,
    /// A revealed fork is not declared.
    ForkSilent,
    /// A gap is stored over without a word.
    GapSilent,
    /// An epoch above what the trail remembers is its successor, so two recorders may choose the same (found by this simulator).
    EpochWithoutChance,
    /// A decoder without footing does not believe in epochs newer than its own, not even in a refusal (found by this simulator).
    RefusalUnheard,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 24] = [
        Self::AckBeforeSync,
        Self::ResumeFromReceived,
        Self::ReplayOffByOne,
        Self::DedupByCount,
        Self::NoDedup,
        Self::CommitOnCompleted,
        Self::AheadIsLoss,
        Self::ReadDestinationEarly,
        Self::EpochNotIncreased,
        Self::HelloNotRepeated,
        Self::DrainWithoutBudget,
        Self::RecoveryKeepsTorn,
        Self::RecoveryCutsSynced,
        Self::StaleEpochObeyed,
        Self::WayBackForgotten,
        Self::RefusedIsStored,
        Self::BatchSwapped,
        Self::DecoderAcrossHosts,
        Self::WedgeIgnored,
        Self::FreeWhatIsSent,
        Self::ForkSilent,
        Self::GapSilent,
        Self::EpochWithoutChance,
        Self::RefusalUnheard,
    ];

    /// The judge that must catch it.
    #[must_use]
    pub fn judge(self) -> Judge {
        match self {
            Self::AckBeforeSync
            | Self::ResumeFromReceived
            | Self::RefusedIsStored
            | Self::FreeWhatIsSent => Judge::AckedIsDurable,
            Self::ReplayOffByOne
            | Self::DedupByCount
            | Self::NoDedup
            | Self::DecoderAcrossHosts
            | Self::GapSilent => Judge::ExactlyOnce,
            Self::BatchSwapped => Judge::Order,
            Self::CommitOnCompleted | Self::ReadDestinationEarly => Judge::Provisional,
            Self::AheadIsLoss => Judge::NoFalseLoss,
            Self::EpochNotIncreased
            | Self::EpochWithoutChance
            | Self::RefusalUnheard
            | Self::HelloNotRepeated
            | Self::StaleEpochObeyed
            | Self::WedgeIgnored => Judge::Progress,
            Self::WayBackForgotten => Judge::WayBack,
            Self::DrainWithoutBudget => Judge::Held,
            Self::RecoveryKeepsTorn | Self::RecoveryCutsSynced => Judge::Recovery,
            Self::ForkSilent => Judge::Fork,
        }
    }
}
