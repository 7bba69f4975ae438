-- r021

CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

INSERT INTO "alembic_version" VALUES('r021');

CREATE TABLE allocation_nodes (
	worker_id VARCHAR(32) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	position INTEGER NOT NULL, 
	num_devices INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	doing TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	free_devices INTEGER, 
	health JSON, 
	CONSTRAINT pk_allocation_nodes PRIMARY KEY (worker_id, name), 
	CONSTRAINT ck_allocation_nodes_state CHECK (state IN ('starting', 'checking', 'idle', 'busy', 'recovering', 'lost', 'quarantined')), 
	CONSTRAINT fk_allocation_nodes_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id) ON DELETE CASCADE
);

CREATE TABLE analyses (
	campaign_id INTEGER NOT NULL, 
	winner_id INTEGER NOT NULL, 
	objective VARCHAR(40) NOT NULL, 
	num_trials INTEGER NOT NULL, 
	last_ended_seq INTEGER NOT NULL, 
	method VARCHAR(200) NOT NULL, 
	computed_at DATETIME NOT NULL, 
	CONSTRAINT pk_analyses PRIMARY KEY (campaign_id), 
	CONSTRAINT fk_analyses_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE, 
	CONSTRAINT fk_analyses_winner_id FOREIGN KEY(winner_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE attempts (
	trial_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker_id VARCHAR(32) NOT NULL, 
	started_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	ending VARCHAR(16), 
	phase VARCHAR(16), 
	held_s DOUBLE, 
	nodes_held DOUBLE, 
	iterations_s DOUBLE, 
	waiting_because TEXT DEFAULT '' NOT NULL, 
	outcome_digest VARCHAR(64), 
	node_seconds DOUBLE NOT NULL, 
	iterations_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	start_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	idle_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	lost_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (trial_id, attempt), 
	CONSTRAINT ck_attempts_ending CHECK (ending IN ('reported', 'lost', 'returned', 'superseded')), 
	CONSTRAINT ck_attempts_ended_has_an_ending CHECK ((ending IS NULL) = (ended_at IS NULL)), 
	CONSTRAINT ck_attempts_counts_from_one CHECK (attempt >= 1), 
	CONSTRAINT ck_attempts_phase CHECK (phase IN ('waiting', 'starting', 'iterating', 'ending')), 
	CONSTRAINT ck_attempts_times CHECK (held_s >= 0 AND nodes_held >= 0 AND iterations_s >= 0), 
	CONSTRAINT ck_attempts_costs_not_negative CHECK (node_seconds >= 0 AND iterations_node_seconds >= 0 AND start_node_seconds >= 0 AND idle_node_seconds >= 0 AND lost_node_seconds >= 0), 
	CONSTRAINT fk_attempts_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE, 
	CONSTRAINT fk_attempts_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id)
);

CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	actor VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	token_id INTEGER, 
	address VARCHAR(64) NOT NULL, 
	action VARCHAR(40) NOT NULL, 
	target_kind VARCHAR(20) NOT NULL, 
	target VARCHAR(255) NOT NULL, 
	details JSON NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (id), 
	CONSTRAINT fk_audit_token_id FOREIGN KEY(token_id) REFERENCES tokens (id)
);

CREATE TABLE breakdowns (
	trial_id INTEGER NOT NULL, 
	compute_s DOUBLE NOT NULL, 
	tp_s DOUBLE NOT NULL, 
	cp_s DOUBLE DEFAULT '0' NOT NULL, 
	ep_s DOUBLE DEFAULT '0' NOT NULL, 
	pp_s DOUBLE NOT NULL, 
	dp_s DOUBLE NOT NULL, 
	optimizer_s DOUBLE NOT NULL, 
	unexplained_s DOUBLE NOT NULL, 
	CONSTRAINT pk_breakdowns PRIMARY KEY (trial_id), 
	CONSTRAINT fk_breakdowns_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);

CREATE TABLE browser_sign_ins (
	secret_hash VARCHAR(64) NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	token_hash VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	owner VARCHAR(64), 
	role VARCHAR(16), 
	source VARCHAR(255), 
	id_token TEXT, 
	CONSTRAINT pk_browser_sign_ins PRIMARY KEY (secret_hash), 
	CONSTRAINT ck_browser_sign_ins_kind CHECK (kind IN ('code', 'session')), 
	CONSTRAINT ck_browser_sign_ins_is_hashed CHECK (length(secret_hash) = 64)
);

CREATE TABLE campaigns (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name VARCHAR(200) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason VARCHAR(40), 
	message TEXT NOT NULL, 
	spec JSON NOT NULL, 
	model_name VARCHAR(200) NOT NULL, 
	cluster_name VARCHAR(200) NOT NULL, 
	trainer VARCHAR(64) DEFAULT 'embedded' NOT NULL, 
	objective VARCHAR(40) NOT NULL, 
	strategy VARCHAR(40) NOT NULL, 
	num_legal_layouts BIGINT NOT NULL, 
	max_peak_memory_bytes BIGINT, 
	probe_deadline_s DOUBLE, 
	last_number INTEGER NOT NULL, 
	last_ended_seq INTEGER NOT NULL, 
	to_beat JSON, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	allocation_idle_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	created_by VARCHAR(64) DEFAULT '' NOT NULL, 
	visibility VARCHAR(8) DEFAULT 'everyone' NOT NULL, 
	group_name VARCHAR(64), 
	priority INTEGER DEFAULT '0' NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	waiting_because TEXT DEFAULT '' NOT NULL, 
	host_failures INTEGER DEFAULT '0' NOT NULL, 
	wall_time_s DOUBLE NOT NULL, 
	clock_at DATETIME, 
	node_seconds DOUBLE NOT NULL, 
	iterations_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	start_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	idle_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	lost_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	CONSTRAINT uq_campaigns_created_by_name UNIQUE (created_by, name), 
	CONSTRAINT ck_campaigns_state CHECK (state IN ('RUNNING', 'PAUSED', 'COMPLETED', 'CANCELLED', 'FAILED')), 
	CONSTRAINT ck_campaigns_visibility CHECK (visibility IN ('private', 'group', 'everyone')), 
	CONSTRAINT ck_campaigns_group_has_a_name CHECK (visibility <> 'group' OR group_name IS NOT NULL), 
	CONSTRAINT ck_campaigns_ended_has_a_time CHECK ((state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)), 
	CONSTRAINT ck_campaigns_ended_has_a_reason CHECK ((state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)), 
	CONSTRAINT ck_campaigns_costs_not_negative CHECK (node_seconds >= 0 AND wall_time_s >= 0), 
	CONSTRAINT ck_campaigns_parts_not_negative CHECK (iterations_node_seconds >= 0 AND start_node_seconds >= 0 AND idle_node_seconds >= 0 AND lost_node_seconds >= 0 AND allocation_idle_node_seconds >= 0), 
	CONSTRAINT ck_campaigns_counters CHECK (num_legal_layouts >= 0 AND last_number >= 0 AND last_ended_seq >= 0), 
	CONSTRAINT ck_campaigns_clock_runs_with_it CHECK (state = 'RUNNING' OR clock_at IS NULL)
);

CREATE TABLE driver_lease (
	id INTEGER NOT NULL, 
	fence BIGINT NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	pid INTEGER NOT NULL, 
	since DATETIME, 
	seen_at DATETIME, 
	released_at DATETIME, 
	CONSTRAINT pk_driver_lease PRIMARY KEY (id), 
	CONSTRAINT ck_driver_lease_is_one CHECK (id = 1)
);

INSERT INTO "driver_lease" VALUES(1,0,'',0,NULL,NULL,NULL);

CREATE TABLE environments (
	trial_id INTEGER NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	backend VARCHAR(40) NOT NULL, 
	python_version VARCHAR(80) NOT NULL, 
	torch_version VARCHAR(80) NOT NULL, 
	numpy_version VARCHAR(80) NOT NULL, 
	git_revision VARCHAR(80) NOT NULL, 
	CONSTRAINT pk_environments PRIMARY KEY (trial_id), 
	CONSTRAINT fk_environments_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE event_counter (
	id INTEGER NOT NULL, 
	last_seq BIGINT DEFAULT '0' NOT NULL, 
	pruned_seq BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_event_counter PRIMARY KEY (id), 
	CONSTRAINT ck_event_counter_is_one CHECK (id = 1)
);

INSERT INTO "event_counter" VALUES(1,0,0);

CREATE TABLE events (
	id INTEGER NOT NULL, 
	seq BIGINT, 
	campaign_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	kind VARCHAR(40) NOT NULL, 
	at DATETIME NOT NULL, 
	data JSON NOT NULL, 
	owner VARCHAR(64), 
	visibility VARCHAR(8), 
	group_name VARCHAR(64), 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT uq_events_seq UNIQUE (seq)
);

CREATE TABLE group_members (
	group_name VARCHAR(64) NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	source VARCHAR(8) NOT NULL, 
	CONSTRAINT pk_group_members PRIMARY KEY (group_name, owner), 
	CONSTRAINT ck_group_members_source CHECK (source IN ('admin', 'claim')), 
	CONSTRAINT fk_group_members_group_name FOREIGN KEY(group_name) REFERENCES owner_groups (name) ON DELETE CASCADE, 
	CONSTRAINT fk_group_members_owner FOREIGN KEY(owner) REFERENCES owners (name) ON DELETE CASCADE
);

CREATE TABLE idempotency_keys (
	actor VARCHAR(64) NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	request_hash VARCHAR(64) NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (actor, "key"), 
	CONSTRAINT fk_idempotency_keys_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE
);

CREATE TABLE imported_rows (
	trial_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	line INTEGER NOT NULL, 
	unstated JSON NOT NULL, 
	aside JSON NOT NULL, 
	peak_memory_bytes BIGINT, 
	CONSTRAINT pk_imported_rows PRIMARY KEY (trial_id), 
	CONSTRAINT fk_imported_rows_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE imports (
	campaign_id INTEGER NOT NULL, 
	source VARCHAR(1000) NOT NULL, 
	aside_columns JSON NOT NULL, 
	CONSTRAINT pk_imports PRIMARY KEY (campaign_id), 
	CONSTRAINT fk_imports_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE
);

CREATE TABLE iterations (
	trial_id INTEGER NOT NULL, 
	"index" INTEGER NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	loss DOUBLE, 
	grad_norm DOUBLE, 
	CONSTRAINT pk_iterations PRIMARY KEY (trial_id, "index"), 
	CONSTRAINT ck_iterations_kind CHECK (kind IN ('warmup', 'timed')), 
	CONSTRAINT fk_iterations_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);

CREATE TABLE knob_importances (
	campaign_id INTEGER NOT NULL, 
	knob VARCHAR(40) NOT NULL, 
	importance DOUBLE NOT NULL, 
	CONSTRAINT pk_knob_importances PRIMARY KEY (campaign_id, knob), 
	CONSTRAINT ck_knob_importances_is_a_share CHECK (importance >= 0 AND importance <= 1), 
	CONSTRAINT fk_knob_importances_campaign_id FOREIGN KEY(campaign_id) REFERENCES analyses (campaign_id) ON DELETE CASCADE
);

CREATE TABLE knob_steps (
	campaign_id INTEGER NOT NULL, 
	knob VARCHAR(40) NOT NULL, 
	direction VARCHAR(4) NOT NULL, 
	value VARCHAR(40) NOT NULL, 
	stepped_value VARCHAR(40) NOT NULL, 
	also VARCHAR(200) NOT NULL, 
	layout_key VARCHAR(120) NOT NULL, 
	source VARCHAR(10) NOT NULL, 
	state VARCHAR(14) NOT NULL, 
	effect DOUBLE, 
	is_apart BOOLEAN, 
	trial_id INTEGER, 
	CONSTRAINT pk_knob_steps PRIMARY KEY (campaign_id, knob, direction), 
	CONSTRAINT ck_knob_steps_direction CHECK (direction IN ('down', 'up')), 
	CONSTRAINT ck_knob_steps_source CHECK (source IN ('measured', 'predicted')), 
	CONSTRAINT ck_knob_steps_state CHECK (state IN ('completed', 'out_of_memory', 'failed')), 
	CONSTRAINT ck_knob_steps_ran_or_not CHECK ((state = 'completed') = (effect IS NOT NULL)), 
	CONSTRAINT ck_knob_steps_measured CHECK (source = 'measured' OR (trial_id IS NULL AND is_apart IS NULL)), 
	CONSTRAINT fk_knob_steps_campaign_id FOREIGN KEY(campaign_id) REFERENCES analyses (campaign_id) ON DELETE CASCADE, 
	CONSTRAINT fk_knob_steps_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE SET NULL
);

CREATE TABLE measurements (
	trial_id INTEGER NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	same_losses_as INTEGER, 
	step_time_s DOUBLE NOT NULL, 
	step_time_q25_s DOUBLE, 
	step_time_q75_s DOUBLE, 
	tokens_per_step BIGINT NOT NULL, 
	tokens_per_s DOUBLE NOT NULL, 
	tokens_per_s_per_device DOUBLE NOT NULL, 
	model_tflops_per_device DOUBLE NOT NULL, 
	hardware_tflops_per_device DOUBLE NOT NULL, 
	peak_tflops_per_device DOUBLE, 
	peak_source VARCHAR(200), 
	mfu DOUBLE, 
	hfu DOUBLE, 
	peak_memory_bytes BIGINT, 
	memory_kind VARCHAR(40), 
	oversubscribed BOOLEAN NOT NULL, 
	warmup_settled BOOLEAN, 
	skipped_steps INTEGER, 
	shortened BOOLEAN DEFAULT 0 NOT NULL, 
	iterations_asked INTEGER, 
	trainer VARCHAR(64) DEFAULT 'embedded' NOT NULL, 
	trainer_version VARCHAR(64) DEFAULT '' NOT NULL, 
	tokens VARCHAR(16) DEFAULT 'counted' NOT NULL, 
	losses_comparable BOOLEAN DEFAULT 1 NOT NULL, 
	others_share DOUBLE, 
	throttled BOOLEAN, 
	balanced_routing BOOLEAN, 
	expert_load DOUBLE, 
	own_share DOUBLE, 
	CONSTRAINT pk_measurements PRIMARY KEY (trial_id), 
	CONSTRAINT fk_measurements_trial_id_campaign_id FOREIGN KEY(trial_id, campaign_id) REFERENCES trials (id, campaign_id) ON DELETE CASCADE, 
	CONSTRAINT ck_measurements_figures CHECK (step_time_s > 0 AND step_time_s < 1e300 AND tokens_per_s > 0 AND tokens_per_s < 1e300 AND tokens_per_s_per_device > 0 AND tokens_per_s_per_device < 1e300 AND model_tflops_per_device > 0 AND model_tflops_per_device < 1e300 AND hardware_tflops_per_device > 0 AND hardware_tflops_per_device < 1e300), 
	CONSTRAINT ck_measurements_counts CHECK (tokens_per_step >= 1 AND peak_memory_bytes >= 0), 
	CONSTRAINT ck_measurements_others_share CHECK (others_share >= 0 AND others_share <= 1)
);

CREATE TABLE node_quarantines (
	cluster VARCHAR(200) NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	scope VARCHAR(64) DEFAULT '' NOT NULL, 
	reported_by VARCHAR(64) DEFAULT '' NOT NULL, 
	reason TEXT NOT NULL, 
	since DATETIME NOT NULL, 
	requested_by_user BOOLEAN NOT NULL, 
	released_at DATETIME, 
	release_pending BOOLEAN NOT NULL, 
	release_told_at DATETIME, 
	CONSTRAINT pk_node_quarantines PRIMARY KEY (cluster, node, scope)
);

CREATE TABLE owner_groups (
	name VARCHAR(64) NOT NULL, 
	weight DOUBLE DEFAULT '1' NOT NULL, 
	created_at DATETIME NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_owner_groups PRIMARY KEY (name), 
	CONSTRAINT ck_owner_groups_weight CHECK (weight > 0 AND weight < 1e300)
);

CREATE TABLE owners (
	name VARCHAR(64) NOT NULL, 
	weight DOUBLE DEFAULT '1' NOT NULL, 
	created_at DATETIME NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_owners PRIMARY KEY (name), 
	CONSTRAINT ck_owners_weight CHECK (weight > 0 AND weight < 1e300)
);

CREATE TABLE past_use (
	campaign_id INTEGER NOT NULL, 
	day VARCHAR(10) NOT NULL, 
	idle_allocations DOUBLE DEFAULT '0' NOT NULL, 
	probes DOUBLE DEFAULT '0' NOT NULL, 
	repeats DOUBLE DEFAULT '0' NOT NULL, 
	idle DOUBLE DEFAULT '0' NOT NULL, 
	lost DOUBLE DEFAULT '0' NOT NULL, 
	trials INTEGER DEFAULT '0' NOT NULL, 
	saved_node_hours DOUBLE, 
	owner VARCHAR(64), 
	visibility VARCHAR(8), 
	group_name VARCHAR(64), 
	name VARCHAR(200), 
	cluster VARCHAR(200), 
	trainer VARCHAR(64), 
	node_hour_price VARCHAR(32), 
	CONSTRAINT pk_past_use PRIMARY KEY (campaign_id, day)
);

CREATE TABLE plans (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	state VARCHAR(8) NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	spec JSON NOT NULL, 
	options JSON NOT NULL, 
	answer JSON NOT NULL, 
	problem TEXT NOT NULL, 
	CONSTRAINT ck_plans_state CHECK (state IN ('WAITING', 'DONE', 'FAILED')), 
	CONSTRAINT ck_plans_end CHECK ((state = 'WAITING') = (ended_at IS NULL))
);

CREATE TABLE predictions (
	trial_id INTEGER NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	log_step_time_sd DOUBLE NOT NULL, 
	peak_memory_bytes BIGINT NOT NULL, 
	fit_probability DOUBLE NOT NULL, 
	source VARCHAR(16) NOT NULL, 
	CONSTRAINT pk_predictions PRIMARY KEY (trial_id), 
	CONSTRAINT ck_predictions_step_time CHECK (step_time_s > 0 AND step_time_s < 1e300), 
	CONSTRAINT ck_predictions_figures CHECK (log_step_time_sd >= 0 AND peak_memory_bytes >= 0), 
	CONSTRAINT ck_predictions_is_a_probability CHECK (fit_probability >= 0 AND fit_probability <= 1), 
	CONSTRAINT ck_predictions_source CHECK (source IN ('estimates', 'calibrated')), 
	CONSTRAINT fk_predictions_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE quotas (
	id INTEGER NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	period VARCHAR(8) NOT NULL, 
	node_hours DOUBLE NOT NULL, 
	beyond VARCHAR(8) NOT NULL, 
	until DATETIME, 
	created_at DATETIME NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_quotas PRIMARY KEY (id), 
	CONSTRAINT ck_quotas_kind CHECK (kind IN ('owner', 'group')), 
	CONSTRAINT ck_quotas_period CHECK (period IN ('day', 'week', 'month', 'year')), 
	CONSTRAINT ck_quotas_beyond CHECK (beyond IN ('refuse', 'wait')), 
	CONSTRAINT ck_quotas_node_hours CHECK (node_hours > 0 AND node_hours < 1e300), 
	CONSTRAINT uq_quotas_kind_name_period UNIQUE (kind, name, period)
);

CREATE TABLE recent_use (
	owner VARCHAR(64) NOT NULL, 
	group_name VARCHAR(64) NOT NULL, 
	cluster VARCHAR(200) NOT NULL, 
	is_simulated BOOLEAN NOT NULL, 
	node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	day DOUBLE DEFAULT '0' NOT NULL, 
	week DOUBLE DEFAULT '0' NOT NULL, 
	month DOUBLE DEFAULT '0' NOT NULL, 
	year DOUBLE DEFAULT '0' NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_recent_use PRIMARY KEY (owner, group_name, cluster, is_simulated), 
	CONSTRAINT ck_recent_use_not_negative CHECK (node_seconds >= 0)
);

CREATE TABLE stage_memories (
	trial_id INTEGER NOT NULL, 
	stage INTEGER NOT NULL, 
	peak_memory_bytes BIGINT NOT NULL, 
	peak_reserved_bytes BIGINT, 
	CONSTRAINT pk_stage_memories PRIMARY KEY (trial_id, stage), 
	CONSTRAINT fk_stage_memories_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);

CREATE TABLE sweeps (
	id INTEGER NOT NULL, 
	swept_at DATETIME, 
	CONSTRAINT pk_sweeps PRIMARY KEY (id), 
	CONSTRAINT ck_sweeps_is_one CHECK (id = 1)
);

INSERT INTO "sweeps" VALUES(1,NULL);

CREATE TABLE tokens (
	id INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	owner VARCHAR(64) DEFAULT '' NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	secret_hash VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	expires_at DATETIME, 
	revoked_at DATETIME, 
	last_used_at DATETIME, 
	device_key VARCHAR(64), 
	device_part VARCHAR(64), 
	part_before VARCHAR(64), 
	user_code VARCHAR(64), 
	asked_from VARCHAR(320), 
	asked_at DATETIME, 
	allowed_by VARCHAR(64), 
	ends_at DATETIME, 
	CONSTRAINT pk_tokens PRIMARY KEY (id), 
	CONSTRAINT ck_tokens_role CHECK (role IN ('viewer', 'submitter', 'admin', 'worker')), 
	CONSTRAINT ck_tokens_is_hashed CHECK (length(secret_hash) = 64), 
	CONSTRAINT uq_tokens_secret_hash UNIQUE (secret_hash)
);

CREATE TABLE trial_logs (
	trial_id INTEGER NOT NULL, 
	tail TEXT NOT NULL, 
	CONSTRAINT pk_trial_logs PRIMARY KEY (trial_id), 
	CONSTRAINT fk_trial_logs_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE trials (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	campaign_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	layout_key VARCHAR(120) NOT NULL, 
	repeat_index INTEGER NOT NULL, 
	repeat_of INTEGER, 
	repeat_reason VARCHAR(16), 
	is_baseline BOOLEAN DEFAULT 0 NOT NULL, 
	num_nodes INTEGER NOT NULL, 
	tp INTEGER NOT NULL, 
	tp_columns INTEGER DEFAULT 1 NOT NULL, 
	cp INTEGER DEFAULT 1 NOT NULL, 
	pp INTEGER NOT NULL, 
	dp INTEGER NOT NULL, 
	ep INTEGER DEFAULT 1 NOT NULL, 
	etp INTEGER DEFAULT 1 NOT NULL, 
	vpp INTEGER NOT NULL, 
	schedule VARCHAR(16) DEFAULT '1f1b' NOT NULL, 
	cp_comm_type VARCHAR(16) DEFAULT 'all_gather' NOT NULL, 
	pipeline_split VARCHAR(24) DEFAULT 'layers' NOT NULL, 
	pipeline_layout VARCHAR(160) DEFAULT 'split' NOT NULL, 
	rank_order VARCHAR(16) DEFAULT 'tp_cp_dp_pp' NOT NULL, 
	micro_batch_size INTEGER NOT NULL, 
	num_microbatches INTEGER NOT NULL, 
	zero_stage INTEGER NOT NULL, 
	zero_replicas INTEGER DEFAULT '1' NOT NULL, 
	recompute VARCHAR(64) NOT NULL, 
	recompute_layers VARCHAR(64) DEFAULT 'all' NOT NULL, 
	offload VARCHAR(16) DEFAULT 'none' NOT NULL, 
	optimizer_states VARCHAR(8) DEFAULT 'fp32' NOT NULL, 
	sequence_parallel BOOLEAN NOT NULL, 
	precision VARCHAR(16) NOT NULL, 
	num_devices INTEGER NOT NULL, 
	global_batch_size INTEGER NOT NULL, 
	job JSON, 
	full_num_nodes INTEGER, 
	full_dp INTEGER, 
	full_num_microbatches INTEGER, 
	num_layers INTEGER, 
	state VARCHAR(16) NOT NULL, 
	reason VARCHAR(40), 
	message TEXT NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	cancel_requested BOOLEAN NOT NULL, 
	attempt INTEGER NOT NULL, 
	lost_attempts INTEGER NOT NULL, 
	iterations_done INTEGER NOT NULL, 
	worker_id VARCHAR(32), 
	lease_expires_at DATETIME, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	ended_seq INTEGER, 
	node_seconds DOUBLE NOT NULL, 
	iterations_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	start_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	idle_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	lost_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	CONSTRAINT uq_trials_campaign_id_number UNIQUE (campaign_id, number), 
	CONSTRAINT uq_trials_campaign_id_layout_key_repeat_index UNIQUE (campaign_id, layout_key, repeat_index), 
	CONSTRAINT uq_trials_campaign_id_ended_seq UNIQUE (campaign_id, ended_seq), 
	CONSTRAINT uq_trials_id_campaign_id UNIQUE (id, campaign_id), 
	CONSTRAINT ck_trials_state CHECK (state IN ('PENDING', 'RUNNING', 'COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')), 
	CONSTRAINT ck_trials_ended_has_a_time CHECK ((state IN ('PENDING', 'RUNNING')) = (ended_at IS NULL)), 
	CONSTRAINT ck_trials_ended_has_a_place CHECK ((ended_at IS NULL) = (ended_seq IS NULL)), 
	CONSTRAINT ck_trials_reason_goes_with_state CHECK ((state IN ('INFEASIBLE', 'FAILED', 'CANCELLED')) = (reason IS NOT NULL)), 
	CONSTRAINT ck_trials_running_has_a_lease CHECK ((state = 'RUNNING') = (worker_id IS NOT NULL AND lease_expires_at IS NOT NULL)), 
	CONSTRAINT ck_trials_repeat_is_explicit CHECK ((repeat_index = 0) = (repeat_of IS NULL)), 
	CONSTRAINT ck_trials_num_devices CHECK (num_devices = tp * tp_columns * cp * pp * dp), 
	CONSTRAINT ck_trials_global_batch_size CHECK (global_batch_size = dp * micro_batch_size * num_microbatches), 
	CONSTRAINT ck_trials_layout_counts CHECK (num_nodes >= 1 AND tp >= 1 AND cp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1), 
	CONSTRAINT ck_trials_tp_columns CHECK (tp_columns >= 1), 
	CONSTRAINT ck_trials_ep CHECK (ep >= 1), 
	CONSTRAINT ck_trials_etp CHECK (etp >= 1), 
	CONSTRAINT ck_trials_cp_comm_type CHECK (cp_comm_type IN ('all_gather', 'p2p', 'a2a')), 
	CONSTRAINT ck_trials_pipeline_split CHECK (pipeline_split IN ('layers', 'embedding', 'head', 'embedding_and_head')), 
	CONSTRAINT ck_trials_rank_order CHECK (rank_order IN ('tp_cp_dp_pp', 'tp_cp_pp_dp')), 
	CONSTRAINT ck_trials_zero_stage CHECK (zero_stage IN (0, 1, 2, 3)), 
	CONSTRAINT ck_trials_recompute CHECK (recompute IN ('none', 'selective', 'full', 'mlp', 'moe_act', 'layernorm', 'mla_up_proj', 'core_attention+mlp', 'core_attention+moe_act', 'core_attention+layernorm', 'core_attention+mla_up_proj', 'mlp+moe_act', 'mlp+layernorm', 'mlp+mla_up_proj', 'moe_act+layernorm', 'moe_act+mla_up_proj', 'layernorm+mla_up_proj', 'core_attention+mlp+moe_act', 'core_attention+mlp+layernorm', 'core_attention+mlp+mla_up_proj', 'core_attention+moe_act+layernorm', 'core_attention+moe_act+mla_up_proj', 'core_attention+layernorm+mla_up_proj', 'mlp+moe_act+layernorm', 'mlp+moe_act+mla_up_proj', 'mlp+layernorm+mla_up_proj', 'moe_act+layernorm+mla_up_proj', 'core_attention+mlp+moe_act+layernorm', 'core_attention+mlp+moe_act+mla_up_proj', 'core_attention+mlp+layernorm+mla_up_proj', 'core_attention+moe_act+layernorm+mla_up_proj', 'mlp+moe_act+layernorm+mla_up_proj', 'core_attention+mlp+moe_act+layernorm+mla_up_proj')), 
	CONSTRAINT ck_trials_offload CHECK (offload IN ('none', 'activations', 'optimizer')), 
	CONSTRAINT ck_trials_optimizer_states CHECK (optimizer_states IN ('fp32', 'bf16')), 
	CONSTRAINT ck_trials_counters CHECK (number >= 1 AND repeat_index >= 0 AND lost_attempts >= 0 AND iterations_done >= 0), 
	CONSTRAINT ck_trials_lost_attempts CHECK (lost_attempts <= attempt), 
	CONSTRAINT ck_trials_running_is_an_attempt CHECK (state <> 'RUNNING' OR attempt >= 1), 
	CONSTRAINT ck_trials_repeats_another CHECK (repeat_of <> id), 
	CONSTRAINT ck_trials_repeat_reason CHECK (repeat_reason IN ('best', 'tie', 'doubted', 'disturbed', 'request')), 
	CONSTRAINT ck_trials_costs_not_negative CHECK (node_seconds >= 0 AND iterations_node_seconds >= 0 AND start_node_seconds >= 0 AND idle_node_seconds >= 0 AND lost_node_seconds >= 0), 
	CONSTRAINT fk_trials_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE, 
	CONSTRAINT fk_trials_repeat_of FOREIGN KEY(repeat_of) REFERENCES trials (id) ON DELETE CASCADE, 
	CONSTRAINT fk_trials_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id), 
	CONSTRAINT ck_trials_precision CHECK (precision IN ('fp32', 'bf16', 'fp16', 'fp8', 'fp8_block', 'mxfp8', 'nvfp4')), 
	CONSTRAINT ck_trials_schedule CHECK (schedule IN ('1f1b', 'gpipe', 'zero_bubble', 'zbv', 'v_half', 'v_min'))
);

CREATE TABLE user_clusters (
	name VARCHAR(64) NOT NULL, 
	description JSON NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_user_clusters PRIMARY KEY (name)
);

CREATE TABLE user_models (
	name VARCHAR(64) NOT NULL, 
	description JSON NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_user_models PRIMARY KEY (name)
);

CREATE TABLE webhook_messages (
	id INTEGER NOT NULL, 
	webhook_id INTEGER NOT NULL, 
	message_id VARCHAR(40) NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	kind VARCHAR(40) NOT NULL, 
	at DATETIME NOT NULL, 
	data JSON NOT NULL, 
	state VARCHAR(12) NOT NULL, 
	attempts INTEGER NOT NULL, 
	next_at DATETIME NOT NULL, 
	problem TEXT NOT NULL, 
	CONSTRAINT pk_webhook_messages PRIMARY KEY (id), 
	CONSTRAINT ck_webhook_messages_state CHECK (state IN ('waiting', 'delivered', 'given up')), 
	CONSTRAINT uq_webhook_messages_webhook_id_message_id UNIQUE (webhook_id, message_id), 
	CONSTRAINT fk_webhook_messages_webhook_id FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE
);

CREATE TABLE webhooks (
	id INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	address TEXT NOT NULL, 
	format VARCHAR(12) NOT NULL, 
	events JSON NOT NULL, 
	campaigns VARCHAR(64) NOT NULL, 
	link TEXT NOT NULL, 
	secret VARCHAR(64) NOT NULL, 
	former_secret VARCHAR(64) NOT NULL, 
	former_until DATETIME NOT NULL, 
	off_because TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_webhooks PRIMARY KEY (id)
);

CREATE TABLE workers (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	cluster VARCHAR(200) NOT NULL, 
	num_nodes INTEGER NOT NULL, 
	num_unusable INTEGER DEFAULT '0' NOT NULL, 
	devices_per_node INTEGER NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	versions JSON NOT NULL, 
	trainers JSON DEFAULT '{}' NOT NULL, 
	trainer_parameters JSON DEFAULT '{}' NOT NULL, 
	trainer_knobs JSON DEFAULT '{}' NOT NULL, 
	registered_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	scheduler VARCHAR(16) DEFAULT 'none' NOT NULL, 
	job_id VARCHAR(64), 
	launcher VARCHAR(40) DEFAULT '' NOT NULL, 
	ends_at DATETIME, 
	shares_nodes BOOLEAN DEFAULT 0 NOT NULL, 
	state VARCHAR(16) DEFAULT 'working' NOT NULL, 
	idle_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	idle_shared_node_seconds DOUBLE DEFAULT '0' NOT NULL, 
	status_at DATETIME, 
	registered_by VARCHAR(64) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_workers PRIMARY KEY (id), 
	CONSTRAINT ck_workers_holds_devices CHECK (num_nodes >= 1 AND devices_per_node >= 1), 
	CONSTRAINT ck_workers_scheduler CHECK (scheduler IN ('slurm', 'none')), 
	CONSTRAINT ck_workers_state CHECK (state IN ('starting', 'working', 'draining')), 
	CONSTRAINT ck_workers_costs_not_negative CHECK (idle_node_seconds >= 0)
);

CREATE TRIGGER campaigns_end_once BEFORE UPDATE OF state ON campaigns WHEN OLD.state IN ('COMPLETED', 'CANCELLED', 'FAILED') AND NEW.state <> OLD.state BEGIN SELECT RAISE(ABORT, 'a campaign that has ended stays as it ended'); END;

CREATE TRIGGER trials_end_once BEFORE UPDATE OF state ON trials WHEN OLD.state IN ('COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED') AND NEW.state IN ('PENDING', 'RUNNING') BEGIN SELECT RAISE(ABORT, 'a trial that has ended neither waits nor runs again'); END;

CREATE TRIGGER attempts_end_once BEFORE UPDATE OF ending ON attempts WHEN OLD.ending IS NOT NULL AND NEW.ending IS NULL BEGIN SELECT RAISE(ABORT, 'an attempt that has ended does not run again'); END;

CREATE TRIGGER measurements_are_results BEFORE INSERT ON measurements WHEN (SELECT state FROM trials WHERE id = NEW.trial_id) NOT IN ('COMPLETED', 'FAILED') BEGIN SELECT RAISE(ABORT, 'a measurement belongs to a trial with a result'); END;

CREATE TRIGGER measurements_stay BEFORE DELETE ON measurements WHEN (SELECT state FROM trials WHERE id = OLD.trial_id) = 'COMPLETED' BEGIN SELECT RAISE(ABORT, 'a completed trial keeps its measurement'); END;

DELETE FROM "sqlite_sequence";

CREATE INDEX ix_allocation_nodes_name ON allocation_nodes (name);

CREATE INDEX ix_analyses_winner_id ON analyses (winner_id);

CREATE INDEX ix_attempts_worker_id ON attempts (worker_id);

CREATE INDEX ix_audit_actor_id ON audit (actor, id);

CREATE INDEX ix_audit_at ON audit (at);

CREATE INDEX ix_audit_target_kind_target_id ON audit (target_kind, target, id);

CREATE INDEX ix_browser_sign_ins_expires_at ON browser_sign_ins (expires_at);

CREATE INDEX ix_browser_sign_ins_token_hash_kind_expires_at ON browser_sign_ins (token_hash, kind, expires_at);

CREATE INDEX ix_campaigns_cluster_name ON campaigns (cluster_name);

CREATE INDEX ix_campaigns_name ON campaigns (name);

CREATE INDEX ix_campaigns_state ON campaigns (state);

CREATE INDEX ix_events_campaign_id_seq ON events (campaign_id, seq);

CREATE INDEX ix_events_unsequenced ON events (id) WHERE seq IS NULL;

CREATE INDEX ix_group_members_owner_group_name ON group_members (owner, group_name);

CREATE INDEX ix_idempotency_keys_campaign_id ON idempotency_keys (campaign_id);

CREATE INDEX ix_idempotency_keys_created_at ON idempotency_keys (created_at);

CREATE INDEX ix_knob_steps_trial_id ON knob_steps (trial_id);

CREATE INDEX ix_measurements_campaign_id_peak_memory_bytes ON measurements (campaign_id, peak_memory_bytes);

CREATE INDEX ix_past_use_day ON past_use (day);

CREATE INDEX ix_plans_state_id ON plans (state, id);

CREATE INDEX ix_trials_campaign_id_job ON trials (campaign_id, job) WHERE job IS NOT NULL;

CREATE INDEX ix_trials_campaign_id_state ON trials (campaign_id, state);

CREATE INDEX ix_trials_repeat_of ON trials (repeat_of);

CREATE INDEX ix_trials_state_id ON trials (state, id);

CREATE INDEX ix_trials_worker_id ON trials (worker_id);

CREATE INDEX ix_webhook_messages_at ON webhook_messages (at);

CREATE INDEX ix_webhook_messages_state_webhook_id_campaign_id_id ON webhook_messages (state, webhook_id, campaign_id, id);

CREATE INDEX ix_webhooks_owner ON webhooks (owner);

CREATE INDEX ix_workers_cluster_seen_at ON workers (cluster, seen_at);

CREATE UNIQUE INDEX uq_attempts_trial_id_open ON attempts (trial_id) WHERE ending IS NULL;

CREATE UNIQUE INDEX uq_campaigns_name_everyone ON campaigns (name) WHERE visibility = 'everyone';

CREATE UNIQUE INDEX uq_tokens_device_key ON tokens (device_key);

CREATE UNIQUE INDEX uq_tokens_name_live ON tokens (name) WHERE revoked_at IS NULL;

CREATE UNIQUE INDEX uq_tokens_user_code ON tokens (user_code);

CREATE UNIQUE INDEX uq_workers_name_live ON workers (name) WHERE ended_at IS NULL;
